"""Sample how much memory each kind of state holds, in some steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil

from zero_offload import malloc
from zero_report import RecordWriter
from zero_report.record.planned import RunPlan

from ..compat import memory_allocated
from ..instruments import memory_rows
from .plan import planned_run

if TYPE_CHECKING:
    from ..offloading import Offloading
    from ..state import TrainingState

_OWNERS = {
    "gathered parameters": "gathered",
    "parameter shards": "parameters",
    "secondary shards": "parameters",
    "placeholders": "parameters",
    "masters": "masters",
    "gradients": "gradients",
    "optimizer states": "states",
}
_PAUSE = 1000  # a step samples memory once this many times the cost of the last samples has passed
_WARM = 3  # steps that all sample: the first one fills buffers, the later ones are like all others
_MAX_SAMPLES = 96  # in one step


class MemorySampler:
    """Records the bytes of each owner (masters, activations and so on) at the ends of passes and units, in some steps:
    the first 3, then so seldom that sampling costs a thousandth of the time. ``plan``: the plan to compare peaks with,
    if any."""

    def __init__(
        self, state: TrainingState, offloading: Offloading, writer: RecordWriter, plan: RunPlan | None
    ) -> None:
        self._state = state
        self._offloading = offloading
        self._planned = planned_run(plan, state, writer)
        self._peaks: dict[str, int] = {}
        self._device: int | None = None
        self._writer = writer
        self._on_host = state.device.type == "cpu"
        self._process = psutil.Process()
        self._buffers = sum(buffer.nbytes for buffer in state.module.buffers())
        self._steps = 0
        self._samples = 0
        self._sample_seconds = 0.0
        self._due = 0.0
        self._before: int | None = None

    def begin_pass(self) -> None:
        """If this step is to be sampled, take its first sample, before its first forward pass. Bytes allocated later
        and held by no owner count as activations."""
        if self._samples == 0 and time.perf_counter() >= self._due:
            self._before = None
            self._take_sample(first=True)

    def sample(self) -> None:
        """Take a sample if `begin_pass` took this step's first one, up to 96 per step."""
        if 0 < self._samples < _MAX_SAMPLES:
            self._take_sample()

    def after_step(self) -> None:
        """End the step's samples, compare their peaks with the plan, if any, and choose when to sample next."""
        self._steps += 1
        if self._samples:
            if self._planned is not None:
                ledger = self._state.ledger
                sent = ledger.sent_bytes() - ledger.sent_bytes("control") - ledger.sent_bytes("exchange")  # not planned
                self._planned.after_step(self._steps, self._peaks, sent, self._device)
            if self._steps >= _WARM:
                self._due = time.perf_counter() + _PAUSE * self._sample_seconds
            self._samples, self._sample_seconds, self._peaks, self._device = 0, 0.0, {}, None

    def _take_sample(self, *, first: bool = False) -> None:
        """Record the bytes of each owner now. ``first``: the step's first, against which activations are measured."""
        begin = time.perf_counter()
        state = self._state
        owners: dict[str, int] = {}
        held = 0
        for row in memory_rows(state.partition, state.optimizer):
            if row.tier != "nvme":
                owner = _OWNERS[row.kind]
                owners[owner] = owners.get(owner, 0) + row.nbytes
                held += row.nbytes if self._on_host or row.tier == "device" else 0
        stored = sum(nbytes for tier, nbytes in self._offloading.memory().items() if tier != "nvme")
        allocated = malloc.allocated_bytes() if self._on_host else memory_allocated(state.device)
        grown = 0
        if allocated is not None:
            if first:
                self._before = allocated - held
            grown = max(0, allocated - held - (self._before if self._before is not None else allocated - held))
        owners["activations"] = max(grown, stored) if self._on_host else grown + stored
        owners["buffers"] = self._buffers
        process = self._process.memory_info().rss
        device = None if self._on_host else allocated
        counted = held + self._buffers + (owners["activations"] if self._on_host else grown)
        owners["other"] = max(0, (process if device is None else device) - counted)
        if self._planned is not None:
            self._peaks = {owner: max(nbytes, self._peaks.get(owner, 0)) for owner, nbytes in owners.items()}
            self._device = device if device is None else max(device, self._device or 0)
        self._writer.memory(owners, process=process, device=device)
        self._samples += 1
        self._sample_seconds += time.perf_counter() - begin
