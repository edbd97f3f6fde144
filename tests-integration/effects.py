"""Everything that can be seen of a short run: what `test_every_key.py` compares between two configurations."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_core
import zero_nvme_aio
from zero_core import checkpointing

VARIES = re.compile(r"\d+(\.\d+)?(e[+-]\d+)?|\b(B|KiB|MiB|GiB|us|ms|s)\b|\s+|[─-╿▀-▟]+|0x[0-9a-f]+")
SAMPLES, WIDTH = 4, 24


class Block(nn.Module):
    """Two linear layers, with a buffer; recomputed where it is told to."""

    def __init__(self, recomputed: bool, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 1.0 / 3.0))
        self._recomputed = recomputed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.dropout(torch.tanh(self.first(x)))) * self.scale.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = checkpointing.checkpoint(self.inner, x) if self._recomputed and self.training else self.inner(x)
        return y  # type: ignore[no-any-return]


class Net(nn.Module):
    """Three blocks, of which the second is frozen, and a head; `seen` lists what runs, in order."""

    def __init__(self, recomputed: bool, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(recomputed, dropout) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1, bias=False)
        self.blocks[1].requires_grad_(False)
        self.seen: list[str] = []
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda *_, name=name: self.seen.append(f"forward {name}"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).square().mean()  # type: ignore[no-any-return]


class Lines(logging.Handler):
    """Keeps what is logged, numbers and units of measure left out, in order with what the model does."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__()
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(f"{record.levelname} {plain(record.getMessage())}")


def plain(text: str) -> str:
    """Text without what differs from run to run."""
    return VARIES.sub(" ", text).strip()


@contextlib.contextmanager
def listening(kept: list[str]) -> Iterator[io.StringIO]:
    """Log records go into ``kept``, and what is printed into the stream."""
    printed, handler, loggers = (
        io.StringIO(),
        Lines(kept),
        [logging.getLogger(n) for n in ("zero_core", "zero_offload")],
    )
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield printed
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def files(folder: Path) -> dict[str, int]:
    """Sizes of all files, their names without numbers."""
    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file():
                name = re.sub(r"[0-9a-f]{8,}|\d+", "#", str(path.relative_to(folder)))
                found[name] = found.get(name, 0) + path.stat().st_size
    return found


def effects(settings: dict[str, Any], folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """Run with ``settings`` and return all facts that can be seen: values, sizes, lines, files.

    ``case``: "steps" (3), "dtype" of the model (torch.float32), "input" dtype, "scale" of the loss by step,
    "recomputed", "dropout" (0.0), "loader" (take batches from a data loader of so many samples).
    """
    torch.manual_seed(0)
    kept: list[str] = []
    seen: dict[str, Any] = {}
    with listening(kept) as printed:
        try:
            seen |= _run(settings, Path(folder), case, kept)
        except Exception as error:
            seen["error"] = f"{type(error).__name__}: {plain(str(error))}"
    seen["lines"] = kept
    seen["printed"] = plain(printed.getvalue())
    seen["left"] = files(Path(folder)) if dist.get_rank() == 0 else {}
    return seen


def _run(settings: dict[str, Any], folder: Path, case: dict[str, Any], kept: list[str]) -> dict[str, Any]:
    model = Net(case.get("recomputed", False), case.get("dropout", 0.0)).to(case.get("dtype", torch.float32))
    model.seen = kept
    engine, _, loader, _ = zero_core.initialize(
        model=model,
        config=settings,
        training_data=torch.randn(case["loader"], WIDTH) if "loader" in case else None,
    )
    kept.clear()  # it begins with the configuration
    seen: dict[str, Any] = {
        "sizes": (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        ),
        "units": [(unit.names, unit.plan.dtype, unit.releasable) for unit in engine.partition.units],
        "dtypes": [(n, t.dtype) for n, t in [*model.named_parameters(), *model.named_buffers()]],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups],
        "batches": None if loader is None else [len(batch) for batch in loader],
    }
    generator = torch.Generator().manual_seed(dist.get_rank())
    history, inputs = [], case.get("input", case.get("dtype", torch.float32))
    for step in range(case.get("steps", 3)):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = (
                engine(torch.randn(SAMPLES, WIDTH, generator=generator).to(inputs)) * case.get("scale", [1.0] * 9)[step]
            )
            engine.backward(loss)
            engine.step()
        history.append((float(loss.detach()), engine.get_global_grad_norm(), engine.loss_scale(), engine.skipped_steps))
    seen["history"] = repr(history)
    seen["memory"] = {by: engine.memory_report(by) for by in ("kind", "tier")}
    seen["sent"] = [
        (phase, unit, row.calls, row.sent_bytes, row.across_bytes) for phase, unit, row in engine.training_state.ledger
    ]
    seen["io"] = sorted((io.block_bytes, io.queue_depth, io.threads) for io in _files_engines())
    seen["swapped"] = files(folder) if dist.get_rank() == 0 else {}
    seen["weights"] = {n: _bits(engine.full_param(p)) for n, p in model.named_parameters() if p.requires_grad}
    engine.destroy()
    return seen


def _files_engines() -> list[zero_nvme_aio.Engine]:
    found = [one for one in gc.get_objects() if type(one) is zero_nvme_aio.Engine]
    return [engine for engine in found if not engine.closed]


def _bits(values: torch.Tensor) -> bytes:
    return values.detach().contiguous().view(torch.uint8).numpy().tobytes()
