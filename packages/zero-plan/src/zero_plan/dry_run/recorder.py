"""The measurements of one rank of a dry run: memory, traffic, operations, bytes of files."""

from __future__ import annotations

import torch.distributed as dist

from zero_core.engine import Engine
from zero_core.instruments import memory_rows

from ..planned import HeldRow, RankPlan, SentRow
from .operations import Operations
from .peak_watch import PeakWatch
from .supervising import PlannedEnds


class DryRunRecorder:
    """Measures one rank: call `begin_step` before each step, `plan` after the last.

    Attributes:
        watch: the live memory.
        ends: provides the tiers with host memory and files, in place of real ones.
        operations: the operations since the step began.
    """

    def __init__(self) -> None:
        self.watch = PeakWatch()
        self.ends = PlannedEnds(self.watch.memory)
        self.operations = Operations(lambda: self.watch.phase in ("forward", "backward"))
        self._moved_before = (0, 0)  # bytes of files read and written before the step

    def begin_step(self, engine: Engine) -> None:
        """Set the counts of traffic, of operations and of bytes in files to 0, as a step of ``engine`` begins."""
        engine.ledger.reset()
        self.operations.clear()
        self._moved_before = self.ends.bytes_moved()

    def plan(self, engine: Engine) -> RankPlan:
        """Return the plan of this rank: the state that ``engine`` holds now, the peaks so far, and the traffic,
        operations and file bytes since `begin_step`.
        """
        held = [HeldRow(*row) for row in memory_rows(engine.partition, engine.sharded_optimizer)]
        sent = [SentRow(phase, name, r.calls, r.sent_bytes, r.across_bytes) for phase, name, r in engine.ledger]
        read, written = (now - then for now, then in zip(self.ends.bytes_moved(), self._moved_before, strict=True))
        return RankPlan(
            dist.get_rank(),
            tuple(held),
            tuple(sent),
            self.watch.peaks(),
            self.ends.files(),
            read,
            written,
            dict(self.operations.flops_by_dtype),
            stage=engine.zero_optimization_stage(),
            accumulation=engine.gradient_accumulation_steps(),
            moved=self.operations.moved_nbytes,
            attention=dict(self.operations.attention_by_dtype),
        )
