"""A model of several units, its data, and the same training by plain torch and by the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zero_core

WIDTH, WIDE = 96, 512
"""Units of the second are longer than the pieces in which sums, norms and copies go through memory."""
BLOCK = WIDTH * WIDTH + WIDTH
"""Elements of a block of `WIDTH`; a wider one is a unit of its own, too."""
BATCH, INPUTS, OUTPUTS = 4, 6, 3
LR = 1e-3
STAGES = (0, 1, 2, 3)
RANKS = 2


class Net(nn.Module):
    """Residual blocks; the loss is a mean over samples, so that ranks of equal batches average to the whole batch's."""

    def __init__(self, blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.enter = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, OUTPUTS)
        self.register_buffer("shift", torch.linspace(-1, 1, width))
        self.motto = "several units"

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        h = torch.tanh(h + self.shift.to(h.dtype))
        for block in self.blocks:
            h = h + torch.tanh(block(h)) / 8
        return self.head(h)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.predict(x).float() if x.dtype.itemsize < 4 else self.predict(x), y)


def build(dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Net:
    """The same model everywhere for the same seed."""
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = Net(**options).to(dtype)
    torch.random.set_rng_state(generator)
    return model


def batch(number: int, dtype: torch.dtype = torch.float64, *, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch ``number``: this rank's samples of it, or all of them."""
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(BATCH, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(BATCH, OUTPUTS, generator=generator, dtype=torch.float64)
    y = y.to(dtype if dtype.itemsize >= 4 else torch.float32)
    if whole or not dist.is_initialized():
        return x, y
    size = BATCH // dist.get_world_size()
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    return x[mine], y[mine]


def config(stage: int, **changes: Any) -> dict[str, Any]:
    """Float64, AdamW, nothing persistent; ``changes`` replace whole sections."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "data_types": {"param_dtype": "fp64"},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": BLOCK + WIDTH,
            "unit_min_numel": BLOCK,
        },
        **changes,
    }


def without(settings: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A configuration less some sections."""
    return {key: value for key, value in settings.items() if key not in keys}


def start(stage: int, model: nn.Module | None = None, **changes: Any) -> zero_core.Engine:
    """An engine over ``model`` (default: `build()`)."""
    model = model if model is not None else build()
    return zero_core.initialize(model=model, config=config(stage, **changes))[0]


def train(engine: zero_core.Engine, first: int, last: int, dtype: torch.dtype = torch.float64) -> list[float]:
    """One step per batch; returns this rank's losses."""
    losses = []
    for number in range(first, last):
        loss = engine(*batch(number, dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module, **changes: Any) -> torch.optim.Optimizer:
    """The optimizer that `config` names, by torch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": LR, "weight_decay": 0.01, **changes})


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int,
    last: int,
    *,
    clip: float = 0.0,
    accumulation: int = 1,
    after: Callable[[], Any] = lambda: None,
) -> list[float]:
    """The same steps by one process, with the whole batch; returns the gradient norms before clipping."""
    norms = []
    for number in range(first, last):
        for micro in range(accumulation):
            model(*batch(number * accumulation + micro, whole=True)).div(accumulation).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        after()
    return norms


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter of a plain model, or of an engine (whole, collective)."""
    if isinstance(model, zero_core.Engine):
        return {name: model.full_param(p) for name, p in model.module.named_parameters()}
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def bits(engine: zero_core.Engine) -> dict[str, bytes]:
    """Every parameter's memory, whole. Collective."""
    return {name: value.numpy().tobytes() for name, value in weights(engine).items()}


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference over all tensors."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def outcome(call: Callable[[], Any]) -> str:
    """The error that a call raises on this rank, as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def recorded(path: Path, **changes: Any) -> dict[str, Any]:
    """Return the changes of a configuration that record the run at ``path``, and ``changes``."""
    return {"run_record": {"path": str(path)}, **changes}
