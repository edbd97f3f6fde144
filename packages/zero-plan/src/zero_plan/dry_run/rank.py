"""One rank's run without memory: the engine, the user's model and a few steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import zero_core
from zero_config import Config
from zero_core.engine import Engine
from zero_core.instruments import memory_rows
from zero_core.recording import RECORD_VARIABLE
from zero_core.supervision import Unsupervised, supervised
from zero_offload import HostBudget
from zero_optim_kernels import rehearsed

from ..errors import PlanError
from ..planned import HeldRow, Peak, RankPlan, SentRow
from .fakes import PlanMode
from .peak_watch import PeakWatch
from .world import fake_world

_STEPS = 3  # the first learns which units a pass uses, the second in which order gradients come
_MONITORS = ("comet", "comms_logger", "csv_monitor", "flops_profiler", "tensorboard", "wandb")
_SAID = ("dump_state", "memory_breakdown", "wall_clock_breakdown")
_WRITING = ("audit_every", "checkpoint", "run_record", "steps_per_print", "timers")


class Rehearsal(Unsupervised):
    """Supervises the engines of a dry run: nothing is printed, written or saved, and this machine's memory is no
    limit."""

    def config(self, given: Any, world_size: int) -> dict[str, Any]:
        """Return the configuration given, without its monitors, records and checkpoints."""
        found = Config.load(given, world_size=world_size)
        _refuse_offload(found)
        plain: dict[str, Any] = {key: value for key, value in found.raw.items() if key not in (*_WRITING, *_SAID)}
        return {**plain, **{section: {"enabled": False} for section in _MONITORS}}

    def budget(self, processes: int) -> HostBudget:
        """No limits."""
        return HostBudget(limits={"memory": (), "locked": (), "shared": (), "disk": ()}, processes=processes)


def rehearse(
    model_fn: Callable[[], nn.Module],
    config: Any,
    batch: Any,
    loss: Callable[[Any], torch.Tensor],
    rank: int,
    world_size: int,
) -> RankPlan:
    """Return what rank ``rank`` of ``world_size`` holds and sends: after a few steps, and in the last of them."""
    if os.environ.get(RECORD_VARIABLE):
        raise PlanError(f"{RECORD_VARIABLE} is set, and a dry run must not write into a run's record: unset it")
    watch = PeakWatch()
    with fake_world(rank, world_size), rehearsed(), supervised(Rehearsal()), _without_warnings(), watch:
        with PlanMode(watch.memory):
            model = model_fn()
            if not isinstance(model, nn.Module):
                raise PlanError(f"model_fn: expected a function that returns a torch.nn.Module, got {model!r}")
            engine = zero_core.initialize(model=model, config=config)[0]
            if engine.optimizer is None:
                raise PlanError('config: a dry run trains, so the configuration has to name an "optimizer"')
            micro_batch = tree_map(_without_values, batch)
            watch.follow(engine)
            for _ in range(_STEPS):
                engine.ledger.reset()
                _step(engine, micro_batch, loss, watch)
            found = _plan_of(engine, rank, watch.peak())
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


def _plan_of(engine: Engine, rank: int, peak: Peak) -> RankPlan:
    held = [HeldRow(*row) for row in memory_rows(engine.partition, engine.sharded_optimizer)]
    sent = [SentRow(phase, name, r.calls, r.sent_bytes, r.across_bytes) for phase, name, r in engine.ledger]
    return RankPlan(rank, tuple(held), tuple(sent), peak)


def _without_values(value: Any) -> Any:
    """A tensor of a batch by its shape alone."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")


def _refuse_offload(config: Config) -> None:
    zero = config.zero_optimization
    for name, section in (
        ("zero_optimization.offload_optimizer.device", zero.offload_optimizer),
        ("zero_optimization.offload_param.device", zero.offload_param),
    ):
        if section.device not in ("none", "cpu"):
            raise PlanError(f'{name}: expected "none" or "cpu", which a dry run follows, got "{section.device}"')
    if config.offload.activations.device != "none":
        raise PlanError('offload.activations.device: expected "none" for a dry run; their traffic is not followed yet')
    if config.offload.delayed_update:
        raise PlanError(
            "offload.delayed_update: expected false for a dry run; a thread beside it would use real memory"
        )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Kernels ask for addresses, which fake tensors do not have; rehearsed ones use none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield
