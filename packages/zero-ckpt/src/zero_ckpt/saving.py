"""Save what all ranks hold as one checkpoint: describe, plan, stage, write, commit. See [Note: two-phase commit]."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .commit import Staging, check_tag, staging_path, sweep, write_durably, write_latest
from .coordination import together
from .direct import make_sink
from .errors import CheckpointError
from .manifest import MANIFEST_NAME, FileEntry, Manifest, Slice, TensorEntry
from .plain import to_plain
from .plan import Holding, Plan, make_plan
from .retention import prune
from .scripts import leave_script
from .types import Coordinator, Interval, SoloCoordinator
from .writer import OpenSink, interval_length, write_rank_file

_KIND = re.compile(r"[A-Za-z0-9_.\-]{1,100}")


def save_sharded(
    root: str | os.PathLike[str],
    tag: str,
    intervals: Iterable[Interval],
    *,
    step: int,
    aliases: Mapping[str, str] | None = None,
    client_state: Any = None,
    config: Any = None,
    rank_state: Any = None,
    coordinator: Coordinator | None = None,
    save_latest: bool = True,
    keep_last: int | None = None,
    open_sink: OpenSink = make_sink,
) -> Path:
    """Write the intervals of all ranks as checkpoint `<root>/<tag>` and return that path; collective.

    Together the ranks must hold every element of every tensor; what several hold is written once, balanced by bytes.
    `aliases` (tied names to the name that is stored), `client_state`, `config` and `step` are taken from rank 0,
    `rank_state` from every rank; all are plain data. `save_latest` points `<root>/latest` at the new checkpoint,
    `keep_last` then removes all but the newest so many. `open_sink` decides how bytes reach the disk: by
    default directly with the `nvme` extra, through ordinary files without.

    The checkpoint appears complete or not at all. Raises CheckpointError on every rank, with every rank's cause, when
    any rank fails: earlier checkpoints are untouched and nothing half-written is left.
    """
    group = coordinator or SoloCoordinator()
    job = _Save(Path(root), tag, group, open_sink, f"saving {Path(root) / tag}")
    extras = {"step": step, "aliases": dict(aliases or {}), "client_state": client_state, "config": config}
    described = together(group, job.what, lambda: job.describe(intervals, extras, rank_state, keep_last))
    job.plan(described)
    try:
        job.token = together(group, job.what, job.stage)[0]
        written = together(group, job.what, job.write)
        together(group, job.what, lambda: job.commit(described, written, save_latest))
    except BaseException:
        job.discard()
        raise
    if keep_last is not None:
        together(group, f"pruning {root}", lambda: job.prune(keep_last))
    return job.root / tag


class _Save:
    """One rank's part of one save; the phases are called in the order in which they stand here."""

    def __init__(self, root: Path, tag: str, group: Coordinator, open_sink: OpenSink, what: str) -> None:
        self.root, self.tag, self.what = root, tag, what
        self.token: str | None = None
        self._group, self._open_sink = group, open_sink
        self._intervals: list[Interval] = []
        self._plan = Plan((), ())
        self._staging: Staging | None = None

    def describe(
        self, intervals: Iterable[Interval], extras: dict[str, Any], rank_state: Any, keep_last: int | None
    ) -> dict[str, Any]:
        check_tag(self.tag)
        if keep_last is not None and keep_last < 1:
            raise CheckpointError(f"keep_last is {keep_last}, expected at least 1")
        if type(extras["step"]) is not int or extras["step"] < 0:
            raise CheckpointError(f"step is {extras['step']!r}, expected an integer of at least 0")
        self._intervals = list(intervals)
        leader = self._group.rank == 0
        return {
            "tag": self.tag,
            "heads": [_head(interval) for interval in self._intervals],
            "rank_state": to_plain(rank_state, "rank_state"),
            "extras": {key: to_plain(value, key) for key, value in extras.items()} if leader else None,
        }

    def plan(self, described: list[dict[str, Any]]) -> None:
        tags = sorted({part["tag"] for part in described})
        if len(tags) > 1:
            raise CheckpointError(f"{self.what}: the ranks disagree on the tag: {tags}")
        holdings = [
            Holding(name, kind, tuple(shape), dtype, offset, length, rank, index)
            for rank, part in enumerate(described)
            for index, (name, kind, shape, dtype, offset, length) in enumerate(part["heads"])
        ]
        self._plan = make_plan(holdings, self._group.world_size)

    def stage(self) -> str | None:
        if self._group.rank != 0:
            return None
        sweep(self.root)
        self._staging = Staging.create(self.root, self.tag)
        return self._staging.token

    def write(self) -> dict[str, Any] | None:
        pieces = self._plan.pieces[self._group.rank]
        if not pieces:
            return None
        directory = staging_path(self.root, self.tag, self.token or "")
        if not directory.is_dir():
            raise CheckpointError(f"{self.root} is not the directory that rank 0 sees; it must be shared by all ranks")
        path = directory / f"rank-{self._group.rank:05d}.safetensors"
        entry, slices = write_rank_file(path, self._intervals, pieces, self._open_sink)
        return {"file": vars(entry), "slices": [vars(piece) for piece in slices]}

    def commit(self, described: list[dict[str, Any]], written: list[dict[str, Any] | None], save_latest: bool) -> None:
        if self._staging is None:
            return
        manifest = _manifest(self._plan, described, written)
        write_durably(self._staging.path / MANIFEST_NAME, manifest.encode())
        leave_script(self.root)
        self._staging.commit()
        if save_latest:
            write_latest(self.root, self.tag)

    def discard(self) -> None:
        if self._staging is not None:
            self._staging.discard()

    def prune(self, keep_last: int) -> None:
        if self._group.rank == 0:
            prune(self.root, keep_last=keep_last, keep=(self.tag,))


def _head(interval: Interval) -> list[Any]:
    where = f"{interval.name!r} ({interval.kind!r})"
    if not isinstance(interval.name, str) or not interval.name:
        raise CheckpointError(f"{where}: a tensor's name must be a string that is not empty")
    if not _KIND.fullmatch(interval.kind):
        raise CheckpointError(f"{where}: a kind is 1 to 100 of the characters A-Z a-z 0-9 _ . -")
    shape = [int(size) for size in interval.shape]
    return [interval.name, interval.kind, shape, interval.dtype, int(interval.offset), interval_length(interval)]


@dataclass
class _Collected:
    files: list[FileEntry]
    slices: dict[tuple[str, str], list[Slice]]


def _manifest(plan: Plan, described: list[dict[str, Any]], written: list[dict[str, Any] | None]) -> Manifest:
    found = _Collected([], {})
    for part, own in zip(described, written, strict=True):
        if own is None:
            continue
        file = len(found.files)
        found.files.append(FileEntry(**own["file"]))
        for item in own["slices"]:
            name, kind = part["heads"][item["index"]][:2]
            piece = Slice(file, item["key"], item["offset"], item["length"], item["checksum"])
            found.slices.setdefault((name, kind), []).append(piece)
    tensors = tuple(
        TensorEntry(
            name, kind, shape, dtype, tuple(sorted(found.slices.get((name, kind), ()), key=lambda piece: piece.offset))
        )
        for name, kind, shape, dtype in plan.tensors
    )
    rank_state = tuple(part["rank_state"] for part in described)
    return Manifest(
        world_size=len(described),
        files=tuple(found.files),
        tensors=tensors,
        rank_state=rank_state if any(state is not None for state in rank_state) else (),
        **described[0]["extras"],
    )
