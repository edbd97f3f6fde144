"""All that is written down about one rank of a dry run."""

from __future__ import annotations

import torch.distributed as dist

from zero_core.engine import Engine
from zero_core.instruments import memory_rows

from ..planned import HeldRow, RankPlan, SentRow
from .operations import Operations
from .peak_watch import PeakWatch
from .supervising import PlannedEnds


class Books:
    """Follows one rank: `begin_step` before each step, `plan` after the last.

    Attributes:
        watch: what is alive. ends: what stands in for memory of tiers and files. operations: of the step.
    """

    def __init__(self) -> None:
        self.watch = PeakWatch()
        self.ends = PlannedEnds(self.watch.memory)
        self.operations = Operations()
        self._before = (0, 0)

    def begin_step(self, engine: Engine) -> None:
        """A step begins."""
        engine.ledger.reset()
        self.operations.clear()
        self._before = self.ends.moved()

    def plan(self, engine: Engine) -> RankPlan:
        """Return what an engine holds now, and has sent, moved and computed since the step began."""
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
