"""`Engine.train_batch` takes micro-batches through one unit after the other and gives the bits of the ordinary loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero_core
from zero_comm import run_ranks
from zero_partition.micro_batch_threads import GeneratorStates

MICRO_BATCHES = 3


class Block(nn.Module):
    def __init__(self, drop: float = 0.0, normed: bool = False) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(12) if normed else nn.LayerNorm(12)
        self.wide, self.narrow, self.drop = nn.Linear(12, 40), nn.Linear(40, 12), nn.Dropout(drop)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x.flatten(0, 1)).view(x.shape)
        return self.drop(self.narrow(F.gelu(self.wide(normed)))) * scale


class Net(nn.Module):
    """Residual blocks over an embedding; code between the blocks computes too."""

    def __init__(self, drop: float = 0.0, normed: bool = False, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 12)
        self.blocks = nn.ModuleList(Block(drop, normed) for _ in range(3))
        self.head = nn.Linear(12, 30, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.embed.requires_grad_(False)
            self.blocks[1].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        scale = hidden.square().mean().sigmoid()  # every block's argument, from the first one's output
        for block in self.blocks:
            hidden = hidden + block(hidden, scale=scale)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.roll(1, 1).flatten())


class Shared(nn.Module):
    """One block that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Embedding(30, 12), Block(), nn.Linear(12, 30)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for _ in range(3):
            hidden = hidden + self.block(hidden, torch.ones(()))
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.roll(1, 1).flatten())


def llama(**more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3}
        return LlamaForCausalLM(LlamaConfig(vocab_size=30, use_cache=False, **sizes, **more))

    return build


def checkpointed_llama() -> nn.Module:
    model = llama()()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama()(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))  # type: ignore[arg-type]


def encoder_decoder() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=30, use_cache=False, decoder_start_token_id=0, **sizes))


def experts() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    more = {"num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=30, use_cache=False, **sizes, **more))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "normed": lambda: Net(normed=True),
    "tied": lambda: Net(tied=True),
    "frozen": lambda: Net(frozen=True),
    "shared": Shared,
    "llama": llama(),
    "tied llama": llama(tie_word_embeddings=True),
    "checkpointed llama": checkpointed_llama,
    "lora": lora,
    "experts": experts,
}


class Case(NamedTuple):
    model: str
    dtype: str = "fp32"
    tier: str = "none"
    stage: int = 3
    inputs: str = "none"  # the tier of what autograd saves
    overlap: str = "off"


def config(case: Case, folder: str, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.stage, "unit_min_numel": 1, "stage3_param_persistence_threshold": 0}
    if case.tier != "none":
        place = {"device": case.tier, **({"nvme_path": folder} if case.tier == "nvme" else {})}
        zero["offload_optimizer"] = {**place, "overlap": case.overlap}
        if case.stage == 3:
            zero["offload_param"] = place
    dtypes = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20}}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.5,
        "steps_per_print": 0,
        "zero_optimization": zero,
        "offload": {"activations": {"device": case.inputs, "nvme_path": folder}} if case.inputs != "none" else {},
        **dtypes.get(case.dtype, {}),
        **more,
    }


def batches(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return [torch.randint(0, 30, (2, 5), generator=generator) for _ in range(MICRO_BATCHES)]


def arguments(model: nn.Module, ids: torch.Tensor) -> Any:
    return {"input_ids": ids, "labels": ids} if hasattr(model, "config") else ids


def facts(engine: Any) -> dict[str, bytes]:
    found = dict(engine.module.named_buffers())
    for name, p in engine.module.named_parameters():
        found[name] = engine.full_param(p)
        held = engine.partition.find(p)
        if held is not None and held[0].plan.trainable:
            found |= {f"{name}/{key}": engine.full_state(p, key) for key in ("exp_avg", "exp_avg_sq")}
    return {
        name: value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in found.items()
    }


def trained(case: Case, folder: str, unit_by_unit: bool) -> tuple[list[float], dict[str, bytes], float, int]:
    model = MODELS[case.model]()
    engine = zero_core.initialize(model=model, config=config(case, folder))[0]
    losses = []
    for step in range(3):
        given = [arguments(model, ids) for ids in batches(step)]
        if unit_by_unit:
            losses.append(float(engine.train_batch(given)))
            continue
        total = torch.zeros(())
        for one in given:
            output = engine(**one) if isinstance(one, dict) else engine(one)
            total = total + engine.backward(output["loss"] if isinstance(one, dict) else output)
            engine.step()
        losses.append(float(total))
    found = losses, facts(engine), engine.get_global_grad_norm(), engine.skipped_steps
    engine.destroy(unshard=False)
    return found


def compared(cases: list[Case], folder: str) -> list[tuple[Case, list[str]]]:
    """By case: what differs between the ordinary loop and `train_batch`."""
    found = []
    for case in cases:
        loop, batch = trained(case, folder, False), trained(case, folder, True)
        same = [loop[0] == batch[0], loop[2:] == batch[2:]]
        wrong = [f"losses {loop[0]} {batch[0]}", f"norm {loop[2:]} {batch[2:]}"]
        differing = [word for word, equal in zip(wrong, same, strict=True) if not equal]
        found.append((case, differing + [name for name, value in loop[1].items() if batch[1][name] != value]))
    return found


CASES = [
    *(Case(model) for model in MODELS),
    *(Case(model, dtype) for model in ("net", "llama", "tied llama") for dtype in ("bf16", "fp16")),
    *(Case(model, "bf16", tier) for model in ("net", "tied llama") for tier in ("cpu", "nvme")),
    *(Case("net", tier="nvme", inputs=tier) for tier in ("cpu", "nvme")),
    Case("net", "bf16", "cpu", overlap="exact"),
    Case("net", stage=2),
    Case("net", "bf16", "cpu", 1),
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_and_moments_are_those_of_the_ordinary_loop(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    of_one = [case for case in CASES if case.tier == "nvme"]  # one rank releases only these
    cases = {1: [*of_one, *(Case(model, tier="nvme") for model in MODELS)], 2: CASES, 3: CASES[:6]}[ranks]
    for found in run_ranks(compared, ranks, cases, str(tmp_path)):
        assert [(case, wrong) for case, wrong in found if wrong] == []


def inexact(folder: str) -> list[tuple[float, float]]:
    """By step, the losses of the ordinary loop and of `train_batch` for an encoder whose output every block reads."""
    MODELS["encoder and decoder"] = encoder_decoder
    loop, batch = (trained(Case("encoder and decoder", tier="nvme"), folder, way) for way in (False, True))
    return list(zip(loop[0], batch[0], strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_that_several_modules_read_twice_is_summed_in_another_order(ranks: int, tmp_path: Path) -> None:
    for loop, batch in run_ranks(inexact, ranks, str(tmp_path))[0]:
        assert loop == pytest.approx(batch, rel=1e-5)


def dropped(folder: str, unit_by_unit: bool) -> tuple[dict[str, bytes], bytes]:
    """Three steps with dropout; in the ordinary loop each micro-batch gets the generators that `train_batch` gives."""
    engine = zero_core.initialize(model=Net(drop=0.3), config=config(Case("net", tier="nvme"), folder))[0]
    torch.manual_seed(7 + dist.get_rank())
    for step in range(3):
        if unit_by_unit:
            engine.train_batch(batches(step))
            continue
        streams = [GeneratorStates(torch.device("cpu")) for _ in range(MICRO_BATCHES)]
        for number in range(1, MICRO_BATCHES):
            streams[number].fork(number)
        for stream, ids in zip(streams, batches(step), strict=True):
            with stream.in_force():
                engine.backward(engine(ids))
            engine.step()
        streams[0].install()
    found = facts(engine), torch.get_rng_state().numpy().tobytes()
    engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_dropout_draws_what_each_micro_batch_draws_alone(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(dropped, ranks, str(tmp_path), True) == run_ranks(dropped, ranks, str(tmp_path), False)


def gathered_bytes(unit_by_unit: bool) -> list[int]:
    """The bytes that this rank sends for gathers, by step."""
    engine = zero_core.initialize(model=Net(), config=config(Case("net"), ""))[0]
    found = []
    for step in range(4):
        before = engine.ledger.sent_bytes("gather")
        if unit_by_unit:
            engine.train_batch(batches(step))
        else:
            for ids in batches(step):
                engine.backward(engine(ids))
                engine.step()
        found.append(engine.ledger.sent_bytes("gather") - before)
    full = sum(unit.layout.numel for unit in engine.partition.units) * 4
    head = next(unit for unit in engine.partition.units if unit.name.startswith("head")).layout.numel * 4
    engine.destroy(unshard=False)
    return [*found, full, head]


def test_a_unit_is_gathered_twice_a_step_and_the_last_one_once() -> None:
    *batch, full, head = run_ranks(gathered_bytes, 2, True)[0]
    *loop, _, _ = run_ranks(gathered_bytes, 2, False)[0]
    assert batch == [(2 * full - head) // 2] * 4
    assert loop[-1] >= MICRO_BATCHES * batch[-1]


def refused(
    folder: str, build: Callable[[], nn.Module], given: Callable[[nn.Module, int], list[Any]]
) -> tuple[str, bool]:
    """What a step says, and whether the next, ordinary one trains."""
    model = build()
    engine = zero_core.initialize(model=model, config=config(Case("net", tier="nvme"), folder))[0]
    with pytest.raises(Exception) as caught:
        engine.train_batch(given(model, dist.get_rank()))
    engine.zero_grad()
    before = engine.full_param(next(model.parameters())).clone()
    for ids in batches(0):
        one = {**arguments(model, ids), "use_cache": False} if hasattr(model, "config") else ids
        output = engine(**one) if isinstance(one, dict) else engine(one)
        engine.backward(output["loss"] if isinstance(one, dict) else output)
        engine.step()
    moved = not torch.equal(before, engine.full_param(next(model.parameters())))
    engine.destroy(unshard=False)
    return f"{type(caught.value).__name__}: {caught.value}", moved


class Cut(Net):
    """Leaves its last block out for short inputs."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks[: 3 if ids.shape[1] > 4 else 2]:
            hidden = hidden + block(hidden, torch.ones(()))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.roll(1, 1).flatten())


class Offset(Net):
    """Uses a parameter of its own between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(12))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) + self.offset
        for block in self.blocks:
            hidden = hidden + block(hidden, torch.ones(()))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.roll(1, 1).flatten())


class Kept(Block):
    """Appends its output to a list that it is given."""

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        kept.append(super().forward(x, torch.ones(())))
        return kept[-1]


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Kept() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(ids)
        kept: list[torch.Tensor] = []
        for block in self.blocks:
            hidden = hidden + block(hidden, kept)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.roll(1, 1).flatten())


class Recomputed(Net):
    """Checkpoints its blocks from outside."""

    reentrant = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, torch.ones(()), use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.roll(1, 1).flatten())


class RecomputedByNesting(Recomputed):
    reentrant = True


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor


class Wrapping(Block):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return Output(super().forward(x, torch.ones(())))


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        self.calls += 1
        return Output(super().forward(x, torch.ones(())) * self.calls).hidden


class Keeping(Block):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        found = super().forward(x, torch.ones(()))
        self.penalty = found.square().mean()
        return found


class Of(Net):
    """Has blocks of another class. ``kind``: that class."""

    kind: type[Block] = Wrapping

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.kind() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(ids)
        for block in self.blocks:
            found = block(hidden)
            hidden = hidden + (found.hidden if isinstance(found, Output) else found)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.roll(1, 1).flatten())


class OfCounting(Of):
    kind = Counting


class OfKeeping(Of):
    kind = Keeping


class Differentiating(Net):
    """Differentiates inside its forward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        found = hidden + self.blocks[0](hidden, torch.ones(()))
        (slope,) = torch.autograd.grad(found.sum(), hidden, retain_graph=True)
        return F.cross_entropy(self.head(found + slope).flatten(0, 1), ids.roll(1, 1).flatten())


def equal(_model: nn.Module, _rank: int) -> list[torch.Tensor]:
    return batches(0)


def one_short(_model: nn.Module, _rank: int) -> list[torch.Tensor]:
    return [ids[:, :4] if n == 1 else ids for n, ids in enumerate(batches(0))]


def rank_1_short(_model: nn.Module, rank: int) -> list[torch.Tensor]:
    return [ids[:, :4] if rank else ids for ids in batches(0)]


def two(_model: nn.Module, _rank: int) -> list[torch.Tensor]:
    return batches(0)[:2]


def words(model: nn.Module, _rank: int) -> list[Any]:
    return [arguments(model, ids) for ids in batches(0)]


def out_of_range(_model: nn.Module, _rank: int) -> list[torch.Tensor]:
    return [ids + (30 if n == 2 else 0) for n, ids in enumerate(batches(0))]


def cached() -> nn.Module:
    model = llama()()
    model.config.use_cache = True
    return model


REFUSED: list[tuple[Callable[[], nn.Module], Callable[[nn.Module, int], list[Any]], list[str]]] = [
    (Net, two, ["UsageError", "gradient_accumulation_steps = 3", "got 2"]),
    (Cut, one_short, ["PartitionError", "micro-batch 0 runs module 'blocks.2' while micro-batch 1 runs module 'head'"]),
    (Offset, equal, ["PartitionError", "'offset'", "into a submodule"]),
    (Listed, equal, ["PartitionError", "module 'blocks.0' changed a list or a dict"]),
    (
        Recomputed,
        equal,
        ["PartitionError", "module 'blocks.2' is called again in backward", "gradient_checkpointing_d"],
    ),
    (RecomputedByNesting, equal, ["PartitionError", "module 'blocks.2' is called again in backward"]),
    (Of, equal, ["PartitionError", "module 'blocks.0' returned a Output"]),
    (OfCounting, equal, ["PartitionError", "module 'blocks.0' changed its buffer 'calls'"]),
    (OfKeeping, equal, ["PartitionError", "module 'blocks.0' has kept a tensor of its forward as 'penalty'"]),
    (Differentiating, equal, ["PartitionError", "autograd.grad went through module 'blocks.0'"]),
    (cached, words, ["PartitionError", "cache", "DynamicCache", "use_cache=False"]),
    (Net, out_of_range, ["IndexError"]),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_go_unit_by_unit_is_refused_by_name_and_the_engine_goes_on(ranks: int, tmp_path: Path) -> None:
    for build, given, expected in REFUSED:
        for said, moved in run_ranks(refused, ranks, str(tmp_path), build, given):
            assert all(word in said for word in expected), said
            assert moved


def goes_on(folder: str) -> dict[str, bytes]:
    """Three steps, before the second of which a loss fails for the second micro-batch."""
    engine = zero_core.initialize(model=Net(), config=config(Case("net", tier="nvme"), folder))[0]
    calls = iter(range(100))

    def failing(output: torch.Tensor, _batch: Any) -> torch.Tensor:
        if next(calls) == 1:
            raise ValueError("no loss")
        return output

    engine.train_batch(batches(0))
    with pytest.raises(ValueError, match="no loss"):
        engine.train_batch(batches(1), failing)
    assert not any(unit.pins for unit in engine.partition.units)
    with pytest.raises(Exception, match="zero_grad"):
        engine.train_batch(batches(1))
    engine.zero_grad()
    for step in (1, 2):
        engine.train_batch(batches(step))
    found = facts(engine)
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(zero_core.UsageError, match="its boundary not set by hand"):
        engine.train_batch(batches(1))
    engine.destroy(unshard=False)
    return found


def went_on(folder: str) -> dict[str, bytes]:
    engine = zero_core.initialize(model=Net(), config=config(Case("net", tier="nvme"), folder))[0]
    for step in range(3):
        engine.train_batch(batches(step))
    found = facts(engine)
    engine.destroy(unshard=False)
    return found


def test_a_caught_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    assert run_ranks(goes_on, 1, str(tmp_path)) == run_ranks(went_on, 1, str(tmp_path))


def fails_alone(folder: str) -> str:
    """What a rank says when only rank 1's second micro-batch fails."""
    engine = zero_core.initialize(model=Net(), config=config(Case("net"), folder))[0]
    given = batches(0)
    given[1] = given[1] + (30 if dist.get_rank() == 1 else 0)
    with pytest.raises(Exception) as caught:
        engine.train_batch(given)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_failure_of_one_rank_ends_the_step_on_all(tmp_path: Path) -> None:
    told, raised = run_ranks(fails_alone, 2, str(tmp_path))
    assert "IndexError" in raised
    assert "rank 1" in told and "IndexError" in told


def test_ranks_whose_micro_batches_visit_other_modules_are_told(tmp_path: Path) -> None:
    for said, moved in run_ranks(refused, 2, str(tmp_path), Cut, rank_1_short):
        assert "PartitionError" in said and "visit different modules" in said
        assert moved
