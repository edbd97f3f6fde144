"""Optimizer state that each rank has for itself (1-bit optimizers), such as what compression has lost so far: one
tensor with a row per rank. An interval is a part of a tensor in a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from zero_ckpt import Interval
from zero_ckpt.torch import Stager
from zero_optim import OneBitOptimizer

from ..state import TrainingState
from .reading import BatchedRead

logger = logging.getLogger("zero_core")

_KIND = "state"
_PREFIX = "optimizer."


def rank_intervals(state: TrainingState, stager: Stager) -> Iterator[Interval]:
    """Yield the intervals of this rank's row in each such tensor; nothing unless the optimizer is a 1-bit one."""
    optimizer, parts = state.torch_optimizer, state.partition
    if isinstance(optimizer, OneBitOptimizer):
        for name, values in optimizer.rank_state().items():
            shape = (parts.world_size, values.numel())
            yield from stager.intervals(_PREFIX + name, _KIND, values, shape=shape, offset=parts.rank * values.numel())


def is_rank_state(state: TrainingState, name: str, kind: str) -> bool:
    """Return whether the checkpoint's tensor (``name``, ``kind``) has a row per rank of this engine's optimizer."""
    optimizer = state.torch_optimizer
    if not isinstance(optimizer, OneBitOptimizer) or kind != _KIND or not name.startswith(_PREFIX):
        return False
    return name.removeprefix(_PREFIX) in optimizer.rank_state_numels()


def load_rank_state(state: TrainingState, reading: BatchedRead) -> None:
    """Have ``reading`` read this rank's rows and give them to the optimizer when it runs; nothing unless that is a
    1-bit one. Tensors of another number of ranks are left out, with a warning on rank 0."""
    optimizer, parts = state.torch_optimizer, state.partition
    if not isinstance(optimizer, OneBitOptimizer):
        return
    found = {}
    for name, numel in optimizer.rank_state_numels().items():
        entry = reading.checkpoint.tensors.get((_PREFIX + name, _KIND))
        if entry is not None and tuple(entry.shape) == (parts.world_size, numel):
            found[name] = torch.empty(numel)
            reading.add(_PREFIX + name, _KIND, parts.rank * numel, found[name])
        elif entry is not None and parts.rank == 0:
            logger.warning(
                "%s: %s of %d ranks does not fit %d: what compression had lost so far is forgotten",
                reading.checkpoint.path,
                name,
                entry.shape[0],
                parts.world_size,
            )
    reading.then(lambda: optimizer.load_rank_state(found))
