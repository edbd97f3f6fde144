"""Runs under `deterministic.across_world_sizes`, and everything of them that has to be the same at any world size."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zero_core

VIRTUAL = 4
WIDTH, SAMPLES, MICRO = 40, 26, 3  # an epoch is three steps
BF16_MASTERS = ("bf16 masters", "bf16 states")
TIERS = ("device", "host", "nvme", "all nvme")


class Model(nn.Module):
    """Dropout, a tied weight, a weight that only some micro-batches use, sizes that are no multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = h + F.dropout(block(h), 0.25, self.training)
        if int(x.sum()) % 3 == 0:
            h = h + self.rare(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), x.roll(1, 1).flatten())


def settings(stage: int, dtype: str, tier: str, folder: str, **changes: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": folder}
    zero: dict[str, Any] = {
        "stage": stage,
        "stage3_param_persistence_threshold": 50,
        "stage3_prefetch_bucket_size": 6000,
        "unit_min_numel": 1,
        "sub_group_size": 4096,
    }
    if "nvme" in tier:
        Path(folder).mkdir(parents=True, exist_ok=True)
    if tier != "device":
        zero["offload_optimizer"] = {"device": "cpu"} if tier == "host" else {**nvme, "buffer_count": 3}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"} if tier == "host" else {**nvme, "buffer_count": 3}
    precision: dict[str, Any] = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    if dtype == "fp64":
        precision = {"data_types": {"param_dtype": "fp64"}}
    elif dtype in BF16_MASTERS:
        masters = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": dtype == "bf16 states"}
        precision = {"bf16": {"enabled": True, **masters}}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "deterministic": {"across_world_sizes": VIRTUAL, "seed": 7},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": zero,
        **precision,
        **changes,
    }


def samples() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.TensorDataset(torch.randint(0, 11, (SAMPLES, 7), generator=generator))


def start(config: dict[str, Any], **arguments: Any) -> zero_core.Engine:
    torch.manual_seed(5)
    return zero_core.initialize(model=Model(), training_data=samples(), config=config, **arguments)[0]


def train(engine: zero_core.Engine, steps: int) -> dict[str, Any]:
    """Losses by (step, virtual rank), and norms by step."""
    found: dict[str, Any] = {}
    last = engine.global_steps + steps
    while engine.global_steps < last:
        assert engine.training_dataloader is not None
        for (x,) in engine.training_dataloader:
            key = f"loss {engine.global_steps}.{engine.virtual_rank()}"
            loss = engine(x)
            found[key] = loss.item().hex()
            engine.backward(loss)
            engine.step()
            norm = engine.get_global_grad_norm()
            if norm is not None:
                found[f"norm {engine.global_steps}"] = norm.hex()
            if engine.global_steps == last:
                break
    return found


def digest(value: torch.Tensor) -> str:
    flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def states(engine: zero_core.Engine) -> dict[str, str]:
    """Digests of every weight and moment, whole."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = digest(engine.full_param(parameter))
        if parameter.requires_grad and not name.startswith("never"):
            kinds = ("exp_avg", "exp_avg_sq")
            found |= {f"{name}/{kind}": digest(engine.full_state(parameter, kind)) for kind in kinds}
    return found


def run(
    config: dict[str, Any], steps: int, folder: str | None = None, load: str | None = None, **arguments: Any
) -> dict[str, Any]:
    engine = start(config, **arguments)
    if load is not None:
        engine.load_checkpoint(load)
    found = train(engine, steps)
    if folder is not None:
        engine.save_checkpoint(folder)
    found |= states(engine)
    found["counters"] = [engine.global_steps, engine.skipped_steps, engine.global_samples, engine.train_batch_size()]
    engine.destroy()
    return found


def merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks saw together; what two of them saw is the same."""
    found: dict[str, Any] = {}
    for answer in answers:
        for key, value in answer.items():
            assert found.setdefault(key, value) == value, key
    return found


def product(cases: list[tuple[int, str, str]], steps: int, folder: str, virtual: int = VIRTUAL) -> dict[Any, Any]:
    """Every (stage, dtype, tier) on this job's ranks."""
    place = str(Path(folder) / f"swap{dist.get_world_size()}")
    ranks = {"deterministic": {"across_world_sizes": virtual, "seed": 7}}
    return {str(case): run(settings(*case, place, **ranks), steps) for case in cases}


def reloaded(cases: list[tuple[int, str]], steps: int, *, loads: bool = True) -> dict[Any, Any]:
    """Every (stage, dtype); if it ``loads``, the optimizer's states are loaded into it after every step."""
    found = {}
    for case in cases:
        engine = start(settings(*case, "device", ""))
        for _ in range(steps):
            train(engine, 1)
            if loads:
                assert engine.optimizer is not None
                engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
        found[str(case)] = states(engine)
        engine.destroy()
    return found


def resumed(folder: str, stage: int, tier: str, steps: list[int], number: int) -> dict[str, Any]:
    """Part ``number`` of a run: from the checkpoint before it, if any, to one of its own."""
    config = settings(stage, "bf16", tier, f"{folder}/swap{number}")
    before = f"{folder}/{number - 1}" if number else None
    return run(config, steps[number], folder=f"{folder}/{number}", load=before)


def failure_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


class Counting(nn.Module):
    """A persistent buffer that forward writes, and one that is a cache."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.inner = Model()
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.inner(x)


Call = Callable[[zero_core.Engine, torch.Tensor], object]


def _one(call: Call, model: nn.Module | None = None, **changes: Any) -> str:
    config = settings(2, "fp32", "device", "", **changes)

    def attempt() -> None:
        engine = zero_core.initialize(model=model or Model(), training_data=samples(), config=config)[0]
        call(engine, samples()[:MICRO][0])

    return failure_of(attempt)


def refusals() -> dict[str, str]:
    """What each misuse raises on this rank, at two ranks."""

    def plain(engine: zero_core.Engine, x: torch.Tensor) -> None:
        engine(x).backward()

    def twice(engine: zero_core.Engine, x: torch.Tensor) -> None:
        loss = engine(x)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)

    def past_the_engine(engine: zero_core.Engine, x: torch.Tensor) -> None:
        engine.backward(engine.module(x))

    def boundary(engine: zero_core.Engine, x: torch.Tensor) -> None:
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(x))
        engine.step()

    def middle(call: str, *arguments: Any) -> Call:
        def attempt(engine: zero_core.Engine, x: torch.Tensor) -> None:
            engine.backward(engine(x))
            engine.step()
            getattr(engine, call)(*arguments)
            engine.backward(engine(x))

        return attempt

    def forward(engine: zero_core.Engine, x: torch.Tensor) -> None:
        engine(x)

    lamb = {"type": "Lamb", "params": {"lr": 1e-3}}
    return {
        "plain": _one(plain),
        "twice": _one(twice),
        "past": _one(past_the_engine),
        "boundary": _one(boundary),
        "zero_grad": _one(middle("zero_grad")),
        "clip": _one(middle("clip_grad_norm_", 1.0)),
        "save": _one(middle("save_checkpoint", "/nowhere")),
        "buffer": _one(forward, Counting(persistent=True)),
        "cache": _one(forward, Counting(persistent=False)),
        "threads": _one_with_threads(forward),
        "lamb": _one(forward, optimizer=lamb),
        "size": _one(lambda engine, x: engine.set_train_batch_size(MICRO * 2)),
    }


def _one_with_threads(call: Call) -> str:
    torch.set_num_threads(1 + dist.get_rank())
    try:
        return _one(call)
    finally:
        torch.set_num_threads(1)
