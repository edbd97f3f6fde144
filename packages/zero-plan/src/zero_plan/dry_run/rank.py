"""One rank's run without memory: the engine, the user's model and a few steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import zero_core
from zero_core.engine import Engine
from zero_core.instruments import memory_rows
from zero_core.recording import RECORD_VARIABLE
from zero_core.supervision import Supervisor, supervised
from zero_offload.ends import tier_ends
from zero_optim_kernels import rehearsed

from ..errors import PlanError
from ..planned import HeldRow, RankPlan, SentRow
from .fakes import PlanMode
from .peak_watch import PeakWatch
from .supervising import PlannedEnds, Rehearsal
from .world import fake_world

STEPS = 3  # the first learns which units a pass uses, the second in which order gradients come


@contextmanager
def dry(by: Supervisor, rank: int, world_size: int, watch: PeakWatch, ends: PlannedEnds) -> Iterator[None]:
    """Have everything below the engine be rank ``rank`` of a world without memory, files and other ranks."""
    if os.environ.get(RECORD_VARIABLE):
        raise PlanError(f"{RECORD_VARIABLE} is set, and a dry run must not write into a run's record: unset it")
    with fake_world(rank, world_size), rehearsed(), supervised(by), tier_ends(ends), _without_warnings(), watch:
        yield


def rehearse(
    model_fn: Callable[[], nn.Module],
    config: Any,
    batch: Any,
    loss: Callable[[Any], torch.Tensor],
    rank: int,
    world_size: int,
) -> RankPlan:
    """Return what rank ``rank`` of ``world_size`` holds and sends: after a few steps, and in the last of them."""
    watch = PeakWatch()
    ends = PlannedEnds(watch.memory)
    with TemporaryDirectory(prefix="zero-plan-") as folder, dry(Rehearsal(Path(folder)), rank, world_size, watch, ends):
        with PlanMode(watch.memory):
            model = model_fn()
            if not isinstance(model, nn.Module):
                raise PlanError(f"model_fn: expected a function that returns a torch.nn.Module, got {model!r}")
            engine = zero_core.initialize(model=model, config=config)[0]
            if engine.optimizer is None:
                raise PlanError('config: a dry run trains, so the configuration has to name an "optimizer"')
            micro_batch = tree_map(_without_values, batch)
            watch.follow(engine)
            for _ in range(STEPS):
                engine.ledger.reset()
                before = ends.moved()
                _step(engine, micro_batch, loss, watch)
            found = plan_of(engine, rank, watch, ends, before)
            engine.destroy(unshard=False)
    return found


def _step(engine: Engine, micro_batch: Any, loss: Callable[[Any], torch.Tensor], watch: PeakWatch) -> None:
    """One step of all its micro-batches."""
    for _ in range(engine.gradient_accumulation_steps()):
        watch.phase = "forward"
        if isinstance(micro_batch, Mapping):
            output = engine(**micro_batch)
        else:
            output = engine(*micro_batch) if isinstance(micro_batch, tuple) else engine(micro_batch)
        found = loss(output)
        watch.phase = "backward"
        engine.backward(found)
        watch.phase = "step"
        engine.step()


def plan_of(engine: Engine, rank: int, watch: PeakWatch, ends: PlannedEnds, before: tuple[int, int]) -> RankPlan:
    """Return what an engine holds now and has sent and moved since its ledger and the counters ``before``."""
    held = [HeldRow(*row) for row in memory_rows(engine.partition, engine.sharded_optimizer)]
    sent = [SentRow(phase, name, r.calls, r.sent_bytes, r.across_bytes) for phase, name, r in engine.ledger]
    read, written = (now - then for now, then in zip(ends.moved(), before, strict=True))
    return RankPlan(rank, tuple(held), tuple(sent), watch.peaks(), ends.files(), read, written)


def _without_values(value: Any) -> Any:
    """A tensor of a batch by its shape alone."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Kernels ask for addresses, which fake tensors do not have; rehearsed ones use none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield
