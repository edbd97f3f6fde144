"""Construct the parts of an engine: the one place that knows which part needs which others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .accumulation import Accumulation
from .audit import Auditor, auditor_for
from .checkpoint import Checkpoints, Dialect, InMemory, LauncherOrders, Saver, periodic_of
from .checkpointing import Checkpointing
from .failures import Failures
from .full_values import FullValues
from .instruments import Instruments, instruments_for
from .monitors import Monitor, build_monitor
from .offloading import Offloading
from .parking import Parking
from .preparation import Loaders
from .state import TrainingState
from .training import Training

if TYPE_CHECKING:
    from .recording.record import RunRecord

logger = logging.getLogger("zero_core")


@dataclass(frozen=True)
class EngineParts:
    """The parts to which an `Engine` delegates; each depends on the `TrainingState`, none on the engine."""

    accumulation: Accumulation
    audit: Auditor
    checkpointing: Checkpointing
    checkpoints: Checkpoints
    failures: Failures
    full: FullValues
    instruments: Instruments
    loaders: Loaders
    monitor: Monitor
    offloading: Offloading
    parking: Parking
    training: Training

    def close(self, state: TrainingState, unshard: bool) -> None:
        """Finish checkpoints, unshard the parameters if ``unshard``, remove hooks, and close groups, monitor and
        instruments. If a save failed, close everything else and then raise `zero_ckpt.CheckpointError`. Collective."""
        _warn_of_last_step(state)
        try:
            self.checkpoints.close()
        finally:
            state.partition.close(unshard=unshard)
            self.offloading.close()
            state.groups.close()
            state.model_part.close()
            self.monitor.close()
            self.instruments.close()


def _warn_of_last_step(state: TrainingState) -> None:
    """Log a warning on rank 0 if the last step did not update the weights and no message has said so yet."""
    last = state.counters.last
    if not state.reports or last is None or last.skipped or state.partition.runtime.failed:
        return
    if not last.taken:
        logger.warning("the gradient norm of the last step is %s: the step left the weights as they were", last.norm)


def compose(
    state: TrainingState,
    offloading: Offloading,
    dialect: Dialect,
    collate_fn: Callable[[list[Any]], Any] | None,
    record: RunRecord | None,
) -> EngineParts:
    """Construct and return the parts of the engine that shares ``state``. ``dialect``: the names in its checkpoints.
    ``collate_fn``: the data loaders' default. ``record``: the run record, or None. Collective."""
    config = state.config
    monitor = build_monitor(config, dist.get_rank())
    instruments = instruments_for(state, monitor)
    if record is not None:
        instruments = record.instruments(instruments, state, offloading)
    audit = auditor_for(state, config.audit_every)
    accumulation = Accumulation(state, on_restart=audit.restart_step)
    failures = Failures(state, accumulation)
    checkpointing = Checkpointing(config.activation_checkpointing, state.model_part.place.group)
    saver = Saver(state, offloading, dialect)
    checkpoints = Checkpoints(
        state,
        failures,
        instruments,
        saver,
        InMemory(state, offloading),
        LauncherOrders.of(state),
        periodic_of(state, saver),
        before_load=audit.forget_digests,
    )
    return EngineParts(
        accumulation=accumulation,
        audit=audit,
        checkpointing=checkpointing,
        checkpoints=checkpoints,
        failures=failures,
        full=FullValues(state),
        instruments=instruments,
        loaders=Loaders(state, collate_fn),
        monitor=monitor,
        offloading=offloading,
        parking=Parking(state, offloading),
        training=Training(state, accumulation, failures, instruments, audit, offloading, checkpointing, checkpoints),
    )
