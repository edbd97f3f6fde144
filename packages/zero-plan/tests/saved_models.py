"""Checkpoints that real runs save and load, whose files, reads and peaks of memory are compared with planned ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from dry_models import Case, tokens
from peak_models import LiveStorages, MeasuredEnds

from zero_ckpt import snapshot
from zero_ckpt.plain import pack
from zero_ckpt.torch.coordinator import DistCoordinator
from zero_offload.ends import tier_ends
from zero_plan import Peak
from zero_plan.dry_run.memory import LiveMemory
from zero_plan.planned import MEMORY_TIERS


class MeasuredSave(NamedTuple):
    """The lengths of the files that a rank put into a checkpoint, the peaks of the save, and the most memory
    that messages took."""

    files: dict[str, int]
    peaks: dict[str, int]
    message_nbytes: int
    copied_nbytes: int


class MeasuredLoad(NamedTuple):
    """The peaks of a load, the bytes that a rank read of data files, and those that it wrote to its tier."""

    peaks: tuple[Peak, ...]
    read: int
    written: int


class LoadEnds(MeasuredEnds):
    """Real memory that is followed, and one real engine for files."""

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__(memory)
        from zero_nvme_aio import Engine

        self.engine = Engine(queue_depth=4)

    def io_engine(self, given: Any) -> Any:
        return self.engine

    def written(self, engine: Any) -> int:
        for tier in (engine.partition.residency, engine.partition.states):
            if tier is not None:
                tier.flush()
        return self.engine.counters()["bytes_written"]


@contextmanager
def copies_followed(memory: LiveMemory) -> Iterator[list[int]]:
    """Count the bytes of memory for copies that background saves take, and follow storages on their thread."""
    found: list[int] = []
    private_memory, finish = snapshot._private_memory, snapshot.Snapshot.finish

    def counted(nbytes: int) -> Any:
        found.append(nbytes)
        return private_memory(nbytes)

    def followed(copied: snapshot.Snapshot) -> None:
        with LiveStorages(memory):
            finish(copied)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot.Snapshot, "finish", followed)
        patch.setattr(snapshot, "_private_memory", counted)
        yield found


@contextmanager
def reads_counted() -> Iterator[list[int]]:
    """Count the bytes that come from positions in files."""
    found: list[int] = []
    preadv = os.preadv

    def counted(*arguments: Any) -> int:
        found.append(preadv(*arguments))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        yield found


@contextmanager
def messages_apart(memory: LiveMemory, own: list[int]) -> Iterator[None]:
    """Count what ranks tell one another about a save as a tier of its own; ``own``: the lengths of this rank's."""
    exchange = DistCoordinator.all_gather_object

    def counted(coordinator: DistCoordinator, obj: Any) -> list[Any]:
        own.append(len(pack(obj)))
        with memory.assigning("messages", ()):
            return exchange(coordinator, obj)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistCoordinator, "all_gather_object", counted)
        yield


def save(cases: list[Case], folder: str) -> list[MeasuredSave]:
    """Train each case on this job's ranks, and save it."""
    return [_save(case, Path(folder) / str(number)) for number, case in enumerate(cases)]


def _save(case: Case, folder: Path) -> MeasuredSave:
    import zero_core
    from zero_plan.dry_run.peak_watch import PeakWatch

    torch.manual_seed(0)
    watch = PeakWatch()
    own: list[int] = []
    with watch, LiveStorages(watch.memory), tier_ends(MeasuredEnds(watch.memory)), messages_apart(watch.memory, own):
        engine = zero_core.initialize(model=case.model(), config=case.config(str(folder)))[0]
        batch = {name: tensor.clone() for name, tensor in tokens().items()}
        watch.follow(engine)
        for _ in range(3 * case.accumulation):
            engine.backward(engine(**batch))
            engine.step()
        watch.reset_peaks("save")
        with copies_followed(watch.memory) as copies:
            engine.save_checkpoint(folder / "checkpoint", "real")
            engine.partition.readers.wait()
            watch.memory.refresh_sizes()
            peaks = {tier: watch.memory.peak[tier] for tier in MEMORY_TIERS if watch.memory.peak.get(tier)}
            mine = f"rank-{engine.partition.data_rank:05d}"
            engine.destroy(unshard=False)
        written = (folder / "checkpoint" / "real").iterdir()
        files = {path.name: path.stat().st_size for path in written if path.name.startswith(mine)}
    messages = max(own, default=0) + watch.memory.peak.get("messages", 0)
    return MeasuredSave(files, peaks, messages, sum(copies))


def load(cases: list[Case], folder: str) -> list[MeasuredLoad]:
    """Load what `save` saved for each case, on this job's ranks."""
    return [_load(case, Path(folder) / str(number)) for number, case in enumerate(cases)]


def _load(case: Case, folder: Path) -> MeasuredLoad:
    import zero_core
    from zero_plan.dry_run.peak_watch import PeakWatch

    watch = PeakWatch()
    ends = LoadEnds(watch.memory)
    with watch, LiveStorages(watch.memory), tier_ends(ends), messages_apart(watch.memory, []):
        engine = zero_core.initialize(model=case.model(), config=case.config(str(folder / "loading")))[0]
        watch.follow(engine)
        before = ends.written(engine)
        watch.reset_peaks("load")
        with reads_counted() as reads:
            engine.load_checkpoint(folder / "checkpoint", "real")
        peaks = watch.peaks()
        written = ends.written(engine) - before
        engine.destroy(unshard=False)
    return MeasuredLoad(peaks, sum(reads), written)
