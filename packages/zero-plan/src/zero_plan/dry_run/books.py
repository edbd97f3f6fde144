"""The record of one rank of a dry run."""

from __future__ import annotations

import torch.distributed as dist

from zero_core.engine import Engine
from zero_core.instruments import memory_rows

from ..planned import HeldRow, RankPlan, SentRow
from .operations import Operations
from .peak_watch import PeakWatch
from .supervising import PlannedEnds


class Books:
    """Records one rank: call `begin_step` before each step, `plan` after the last.

    Attributes:
        watch: the live memory. ends: the stand-in for host memory and files of tiers. operations: those of the step.
    """

    def __init__(self) -> None:
        self.watch = PeakWatch()
        self.ends = PlannedEnds(self.watch.memory)
        self.operations = Operations()
        self._before = (0, 0)

    def begin_step(self, engine: Engine) -> None:
        """Reset the counts of traffic, operations and file bytes."""
        engine.ledger.reset()
        self.operations.clear()
        self._before = self.ends.moved()

    def plan(self, engine: Engine) -> RankPlan:
        """Return what an engine holds now, and what it has sent, moved and computed since the step began."""
        held = [HeldRow(*row) for row in memory_rows(engine.partition, engine.sharded_optimizer)]
        sent = [SentRow(phase, name, r.calls, r.sent_bytes, r.across_bytes) for phase, name, r in engine.ledger]
        read, written = (now - then for now, then in zip(self.ends.moved(), self._before, strict=True))
        return RankPlan(
            dist.get_rank(),
            tuple(held),
            tuple(sent),
            self.watch.peaks(),
            self.ends.files(),
            read,
            written,
            dict(self.operations.counted),
        )
