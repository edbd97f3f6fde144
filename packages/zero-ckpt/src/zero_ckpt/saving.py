"""Save all ranks' intervals as one checkpoint: describe, plan, stage, write, commit. See [Note: two-phase commit].

An interval is a run of a flattened tensor's elements with this rank's data for it (see `types.Interval`); a slice is a
run of elements in one file of the checkpoint. The staged directory is the hidden one into which the ranks write before
it is renamed to the tag.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .commit import Staging, staging_path, sweep
from .contribution import write_contribution
from .coordination import run_on_all_ranks
from .direct import make_sink
from .dry_run import DryRunRanks, current_dry_run
from .durable import write_durably
from .errors import CheckpointError
from .latest import check_new_tag, require_replaceable, write_latest
from .manifest import MANIFEST_NAME, FileEntry, Manifest, Slice, TensorEntry
from .plain import to_plain
from .plan import Holding, SavePlan, make_plan
from .relative import absolute
from .retention import prune
from .scripts import leave_script
from .types import Coordinator, FileExtent, Interval, SoloCoordinator, is_kind
from .writer import OpenSink, interval_length

logger = logging.getLogger("zero_ckpt")


def save_sharded(
    root: str | os.PathLike[str],
    tag: str,
    intervals: Iterable[Interval],
    *,
    step: int,
    aliases: Mapping[str, str] | None = None,
    frozen: Collection[str] | None = None,
    client_state: Any = None,
    config: Any = None,
    rank_state: Any = None,
    beside: Mapping[str, bytes] | None = None,
    coordinator: Coordinator | None = None,
    save_latest: bool = True,
    replace_existing: bool = True,
    keep_last: int | None = None,
    node: str | None = None,
    open_sink: OpenSink = make_sink,
) -> Path:
    """Write the intervals of all ranks as checkpoint `<root>/<tag>` and return that path; collective.

    Together the ranks must hold every element of every tensor; elements on several ranks are written once, balanced by
    bytes. A checkpoint of that tag is replaced, or refused without `replace_existing`. `aliases` (tied names to the
    name that is stored), `frozen` (names of parameters that are not trained), `client_state`, `config` and `step` are
    taken from rank 0, `rank_state` from every rank; all are plain data (see `zero_ckpt.plain`). `beside` (name to
    contents, from rank 0) becomes small files in the directory, which nothing here reads.

    `save_latest` points `<root>/latest` at the new checkpoint. `keep_last` then removes all but that many of the newest
    checkpoints; one that cannot be removed is logged and left. `open_sink` decides how bytes reach the disk: by default
    with direct I/O if the `nvme` extra is installed, otherwise through the page cache. An interval that is a
    `FileExtent` of a sealed file is linked instead (see [Note: linked files]). Without a `coordinator` this process is
    the only rank.

    Where nodes do not share a file system, `node` names this rank's: each node then has its own directory with its
    ranks' files and a manifest of the whole, and elements on several nodes are written on each. Such a checkpoint loads
    on the same nodes, and anywhere once the nodes' files are copied into one directory.

    The checkpoint appears complete or not at all. Raises CheckpointError on every rank, with every rank's cause, when
    any rank fails: earlier checkpoints are untouched and no partial one is left.
    """
    group = coordinator or SoloCoordinator()
    dry_run = current_dry_run()
    if dry_run is not None:
        group = DryRunRanks(group, dry_run)
    job = SaveJob(Path(root), tag, group, open_sink, node)
    extras = {"step": step, "aliases": dict(aliases or {}), "client_state": client_state, "config": config}
    extras["frozen"] = None if frozen is None else sorted(frozen)
    described = run_on_all_ranks(group, job.what, lambda: job.describe(intervals, extras, rank_state, keep_last))
    job.plan(described)
    try:
        run_on_all_ranks(group, job.what, job.stage)
        written = run_on_all_ranks(group, job.what, job.write)

        def commit() -> None:
            """Write the manifest and give the checkpoint its name, on the ranks that staged a directory; a step of
            `run_on_all_ranks`."""
            job.seal(described, written, beside or {})
            job.commit(replace_existing, save_latest)

        run_on_all_ranks(group, job.what, commit)
    except BaseException:
        job.discard()
        raise
    if keep_last is not None:
        run_on_all_ranks(group, f"pruning {root}", lambda: job.prune(keep_last))
    return job.root / tag


class SaveJob:
    """One rank's work in one save. The phases are called in the order in which they stand here, each on every rank.

    The arguments are those of `save_sharded`; `group` is the coordinator, and `judge` raises CheckpointError if what is
    at the path it is called with must not be replaced (None: `commit.require_replaceable`). The attributes `rank` and
    `ranks` are those of the coordinator.
    """

    def __init__(
        self,
        root: Path,
        tag: str,
        group: Coordinator,
        open_sink: OpenSink,
        node: str | None,
        judge: Callable[[Path], None] | None = None,
    ) -> None:
        self.root, self.tag, self.what = root, tag, f"saving {root / tag}"
        self._group, self._open_sink, self._node, self._judge = group, open_sink, node, judge
        self.rank, self.ranks = group.rank, group.world_size
        self._nodes: list[str] | None = None
        self._leads = group.rank == 0 or isinstance(group, DryRunRanks)
        self._token = ""
        self._intervals: list[Interval] = []
        self._plan = SavePlan((), ())
        self._staging: Staging | None = None

    def describe(
        self, intervals: Iterable[Interval], extras: dict[str, Any], rank_state: Any, keep_last: int | None
    ) -> dict[str, Any]:
        """Check the arguments and return, as plain data, what the other ranks need to know of this one.

        That is its tag, node and random token, the head of each interval (see `_interval_head`), its rank state, and
        `extras` (step, aliases, frozen, client state and configuration; None on ranks other than 0). `keep_last` is
        only checked. Raises CheckpointError for an argument that cannot be saved.
        """
        check_new_tag(self.tag)
        absolute(self.root)
        if keep_last is not None and keep_last < 1:
            raise CheckpointError(f"keep_last is {keep_last}, expected at least 1")
        if type(extras["step"]) is not int or extras["step"] < 0:
            raise CheckpointError(f"step is {extras['step']!r}, expected an integer of at least 0")
        self._intervals = list(intervals)
        return {
            "tag": self.tag,
            "node": self._node,
            "token": os.urandom(6).hex(),
            "heads": [_interval_head(interval) for interval in self._intervals],
            "rank_state": to_plain(rank_state, "rank_state"),
            "extras": {key: to_plain(value, key) for key, value in extras.items()} if self._leads else None,
        }

    def plan(self, described: list[dict[str, Any]]) -> None:
        """Decide which rank writes which elements, and which ranks lead: the first of each file system makes its
        directory.

        `described` is what `describe` returned, by rank; rank 0's token is taken for all. Raises CheckpointError when
        the ranks disagree on the tag, on whether nodes are named or on a tensor, or when no rank holds some element.
        """
        tags = sorted({part["tag"] for part in described})
        if len(tags) > 1:
            raise CheckpointError(f"{self.what}: the ranks disagree on the tag: {tags}")
        self._token = described[0]["token"]
        nodes = [part["node"] for part in described]
        if any(node is not None for node in nodes):
            if not all(isinstance(node, str) for node in nodes):
                raise CheckpointError(f"{self.what}: all ranks name their node, or none does; got {nodes}")
            self._nodes = nodes
            self._leads = nodes.index(nodes[self._group.rank]) == self._group.rank
        holdings = [
            Holding(name, kind, tuple(shape), dtype, offset, length, rank, index, linked)
            for rank, part in enumerate(described)
            for index, (name, kind, shape, dtype, offset, length, linked) in enumerate(part["heads"])
        ]
        self._plan = make_plan(holdings, self._group.world_size, self._nodes)

    def stage(self) -> None:
        """Sweep the root of interrupted saves and make the staged directory, on the first rank of each file system;
        does nothing on other ranks. Raises CheckpointError when something that must not be replaced has the name of the
        tag or of `latest`."""
        if self._leads:
            sweep(self.root)
            require_replaceable(self.root)
            self._staging = Staging.create(self.root, self.tag, self._token, self._judge)

    def write(self) -> dict[str, Any] | None:
        """Write this rank's files into the staged directory, and wait until they are on disk.

        Returns their manifest entries (`files`) and slices (`slices`) as plain data, None if the plan gives this rank
        nothing to write. Raises CheckpointError when this rank does not see the directory or an interval's data is not
        what it claims, and OSError when writing fails.
        """
        pieces = self._plan.pieces[self._group.rank]
        if not pieces:
            return None
        directory = self.staged
        if not directory.is_dir():
            raise CheckpointError(
                f"{self.root} is not the directory that rank 0 sees; it must be shared by all ranks, or node= be given"
            )
        files, slices = write_contribution(directory, self._group.rank, self._intervals, pieces, self._open_sink)
        return {"files": [entry.encode() for entry in files], "slices": [vars(piece) for piece in slices]}

    @property
    def staged(self) -> Path:
        """The directory into which the ranks write until the commit."""
        return staging_path(self.root, self.tag, self._token)

    def seal(
        self, described: list[dict[str, Any]], written: list[dict[str, Any] | None], beside: Mapping[str, bytes]
    ) -> None:
        """Write the manifest and the small files of `beside` (contents by name) into the staged directory, on the ranks
        that made one; does nothing on others.

        `described` and `written` are the results of `describe` and `write`, by rank.
        """
        if self._staging is None:
            return
        for name, data in beside.items():
            _write_beside(self._staging.path, name, data)
        manifest = replace(_build_manifest(self._plan, described, written, self._own_ranks()), tag=self.tag)
        dry_run = current_dry_run()
        if dry_run is not None:
            dry_run.manifest = manifest
        write_durably(self._staging.path / MANIFEST_NAME, manifest.encode())

    def commit(self, replace_existing: bool, save_latest: bool) -> None:
        """Rename the sealed directory to the tag, point `latest` at it if `save_latest`, and leave the script
        `zero_to_fp32.py` in the root, on the ranks that made a directory; does nothing on others.

        Raises CheckpointError when something has that name and `replace_existing` is False.
        """
        if self._staging is None:
            return
        leave_script(self.root)
        self._staging.commit(replace_existing=replace_existing)
        if save_latest:
            write_latest(self.root, self.tag)

    def _own_ranks(self) -> set[int]:
        """Return the ranks that share this rank's file system."""
        nodes = self._nodes or [""] * self._group.world_size
        return {rank for rank, node in enumerate(nodes) if node == nodes[self._group.rank]}

    def discard(self) -> None:
        """Remove the staged directory unless it was committed; does nothing on ranks that made none."""
        if self._staging is not None:
            self._staging.discard()

    def prune(self, keep_last: int) -> None:
        """Remove all but the newest `keep_last` checkpoints, and never this one, on the ranks that made a directory. A
        failure is only logged, as this save has succeeded."""
        if not self._leads:
            return
        try:
            prune(self.root, keep_last=keep_last, keep=(self.tag,))
        except (OSError, CheckpointError) as error:  # the checkpoint is saved; that an old one is left is no failure
            logger.warning("saved %s, but could not remove older checkpoints: %s", self.root / self.tag, error)


def _write_beside(directory: Path, name: str, data: bytes) -> None:
    """Write the small file `name` into the checkpoint `directory`. Raises CheckpointError for a name that the
    checkpoint uses itself or that leads to another directory."""
    path = directory / name
    if path.parent != directory or path.suffix == ".safetensors" or name == MANIFEST_NAME:
        raise CheckpointError(f"beside[{name!r}]: expected a file name that is not the checkpoint's own")
    write_durably(path, data)


def _interval_head(interval: Interval) -> list[Any]:
    """Check an interval and return its head: [name, kind, shape, dtype, offset, length, whether it is linked].

    `offset` and `length` are in elements; linked is one whose data is a `FileExtent`. Raises CheckpointError for a bad
    name, kind, dtype or range.
    """
    where = f"{interval.name!r} ({interval.kind!r})"
    if not isinstance(interval.name, str) or not interval.name:
        raise CheckpointError(f"{where}: a tensor's name must be a string that is not empty")
    to_plain(interval.name, f"the name of tensor {where}")
    if not is_kind(interval.kind):
        raise CheckpointError(f"{where}: a kind is 1 to 100 of the characters A-Z a-z 0-9 _ . -")
    shape = [int(size) for size in interval.shape]
    linked = isinstance(interval.data, FileExtent)
    length = interval_length(interval)
    return [interval.name, interval.kind, shape, interval.dtype, int(interval.offset), length, linked]


def _build_manifest(
    plan: SavePlan, described: list[dict[str, Any]], written: list[dict[str, Any] | None], own_ranks: set[int]
) -> Manifest:
    """Return the manifest for one file system, whose ranks are `own_ranks`. Of an element that several nodes wrote, the
    manifest has the copy of these ranks.

    `described` and `written` are the results of `SaveJob.describe` and `SaveJob.write`, by rank.
    """
    files: list[FileEntry] = []
    slices: dict[tuple[str, str], list[Slice]] = {}
    order = sorted(range(len(written)), key=lambda rank: rank not in own_ranks)
    for rank in order:
        own = written[rank]
        if own is None:
            continue
        for item in own["slices"]:
            name, kind = described[rank]["heads"][item["index"]][:2]
            place = {key: item[key] for key in ("key", "offset", "length", "checksum", "begin")}
            slices.setdefault((name, kind), []).append(Slice(len(files) + item["file"], **place))
        files += [_decode_file_entry(table) for table in own["files"]]
    tensors = tuple(
        TensorEntry(name, kind, shape, dtype, _drop_duplicates(slices.get((name, kind), [])))
        for name, kind, shape, dtype in plan.tensors
    )
    rank_state = tuple(part["rank_state"] for part in described)
    extras = described[0]["extras"]
    return Manifest(
        world_size=len(described),
        files=tuple(files),
        tensors=tensors,
        rank_state=rank_state if any(state is not None for state in rank_state) else (),
        per_node=len(own_ranks) < len(described),
        **{**extras, "frozen": None if extras["frozen"] is None else frozenset(extras["frozen"])},
    )


def _decode_file_entry(table: dict[str, Any]) -> FileEntry:
    """Return the `FileEntry` whose `encode` returned `table`."""
    extents = table.get("extents")
    return FileEntry(
        **{**table, "extents": None if extents is None else tuple((nbytes, digest) for nbytes, digest in extents)}
    )


def _drop_duplicates(candidates: list[Slice]) -> tuple[Slice, ...]:
    """Return slices of one tensor sorted by offset, without those that overlap an earlier one of the list.

    They occur because each node writes its own copy of a replicated tensor, and may split it at other elements.
    """
    chosen: list[Slice] = []
    for piece in candidates:
        at = bisect_left(chosen, piece.offset, key=lambda known: known.offset)
        after = chosen[at].offset if at < len(chosen) else piece.offset + piece.length
        before = chosen[at - 1].offset + chosen[at - 1].length if at else 0
        if before <= piece.offset and piece.offset + piece.length <= after:
            chosen.insert(at, piece)
    return tuple(chosen)
