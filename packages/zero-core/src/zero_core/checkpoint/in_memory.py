"""Copies of the training state in node memory (RAM that survives the job's processes), written in the background; see
[Note: node memory] in zero-ckpt."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from zero_ckpt import Manifest, TensorEntry
from zero_ckpt.torch import Found, NodeMemory, node_memory_folder
from zero_comm import destroy_group

from ..offloading import Offloading
from ..state import TrainingState
from .fragments import master_fragments
from .intervals import StateIntervals
from .names import named_parameters
from .periodic import require_folder
from .saving import check_room, checkpoint_options, own_group
from .tier_files import TierFiles

logger = logging.getLogger("zero_core")
_RUN = "run"


class InMemory:
    """Copies the engine's state into the memory of the nodes, as ``checkpoint.in_memory`` says; without a path there
    into `node_memory_folder`. ``run``, in its methods: the folder of the run's checkpoints on disk; None, if `resume`
    and saves have not named it yet, stands for ``checkpoint.path``."""

    def __init__(self, state: TrainingState, offloading: Offloading) -> None:
        section = state.config.checkpoint.in_memory
        self._state, self._offloading = state, offloading
        self._every, self._path, self._disk = section.every, section.path, state.config.checkpoint.path
        self._memory: NodeMemory | None = None
        self._group: dist.ProcessGroup | None = None

    def check(self, run: str | None) -> None:
        """Raise `UsageError` if copies are asked for, but no path, ``run`` or ``checkpoint.path`` names a folder."""
        if self._every:
            key = "checkpoint.in_memory"
            require_folder(f"{key}.every is {self._every}", f"{key}.path", self._path or run or self._disk)

    def after_step(self, run: str | None) -> bool:
        """Start a copy if one is due after this step; return whether it was. Collective then. Raises
        `zero_ckpt.CheckpointError` if the copy before has failed."""
        state = self._state
        if not self._every or state.counters.global_steps % self._every:
            return False
        memory, parts = self._open(run), state.partition
        parts.runtime.agree("copy into node memory", "", None)  # the folder may differ from node to node
        parts.finish_updates()
        files = TierFiles(state, self._offloading, memory.directory)
        named = named_parameters(state.module)
        intervals = StateIntervals(state, files, False, named, replicated=memory.leads, every_replica=True)
        intervals.settle_masters()
        options = checkpoint_options(state, {}, named, state.config.to_plain())
        options["client_state"][_RUN] = run
        memory.save(intervals.present(), memory=intervals.memory(), later_intervals=intervals.later, **options)
        return True

    def find(self, run: str) -> Found | None:
        """Return the newest complete copy in node memory that names ``run`` or no run; None if there is none, or if
        copies are off. Later copies go into the folder of this ``run``. Collective."""
        self.close()
        return self._open(run).find(lambda manifest: _is_of(manifest, run)) if self._every else None

    def fetch(self, found: Found, run: str) -> Path:
        """Copy the files of ``found`` that this node's ranks lack to it; return the folder with its tag. Collective."""
        return self._open(run).fetch(found, lambda manifest: files_to_read(self._state, manifest)).parent

    @property
    def has_failed(self) -> bool:
        """Return whether a copy failed whose error was not raised yet."""
        return self._memory is not None and self._memory.has_failed

    def wait_for_copies(self) -> None:
        """Wait until the running copy has read shards, masters and states, so that they may be written."""
        if self._memory is not None:
            self._memory.copied()

    def wait(self) -> None:
        """Wait until the copy that was started is complete. Raises `zero_ckpt.CheckpointError` if it failed."""
        if self._memory is not None:
            self._memory.wait()

    def close(self) -> None:
        """Finish the copy that was started, if any, and end its threads; complete copies stay in memory. Raises
        `zero_ckpt.CheckpointError` if it failed."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        try:
            memory.close()
        finally:
            if self._group is not None:
                destroy_group(self._group)
            self._group = None

    def _open(self, run: str | None) -> NodeMemory:
        """Return the node memory, which the first call opens, with a process group of its own. Collective then."""
        if self._memory is None:
            folder = Path(self._path or node_memory_folder(str(run or self._disk)))
            self._group = own_group(self._state)
            self._memory = NodeMemory(self._state.model_part.subfolder(folder), self._group, allow=check_room)
        return self._memory


def _is_of(manifest: Manifest, run: str) -> bool:
    """Return whether the copy with this ``manifest`` is of the run ``run`` or of none; if not, log a warning."""
    kept = manifest.client_state.get(_RUN) if isinstance(manifest.client_state, dict) else None
    if kept in (None, run):
        return True
    logger.warning(
        "a copy of step %d in the nodes' memory is of the run with checkpoints in %s, not in %s: it is passed over",
        *(manifest.step, kept, run),
    )
    return False


def files_to_read(state: TrainingState, manifest: Manifest) -> Iterator[str]:
    """Yield the paths, below the checkpoint's folder, of the files that this rank needs to load it: those that overlap
    its fragments, and all files of tensors that are in no unit."""
    spans, shapes = _spans(state), {e.name: e.shape for unit in state.partition.layout.units for e in unit.entries}
    needed: set[int] = set()
    for tensor in manifest.tensors:
        if tensor.name not in shapes:
            needed.update(piece.file for piece in tensor.slices)
        elif tensor.name in spans:
            needed.update(_overlapping(tensor, spans[tensor.name], same_shape=tensor.shape == shapes[tensor.name]))
    for index in sorted(needed):
        yield manifest.files[index].path


def _spans(state: TrainingState) -> dict[str, list[tuple[int, int]]]:
    """Return, by parameter name, the element ranges [first, end) that this rank loads of weights, masters and
    states."""
    parts, sharded = state.partition, state.optimizer
    spans: dict[str, list[tuple[int, int]]] = {}
    fragments = [f for unit in parts.units for f in unit.layout.fragments(parts.rank)]
    fragments += [f for unit in parts.units for f, _ in master_fragments(unit, parts.owned_ranks())]
    fragments += [owned.fragment for owned in sharded.fragments] if sharded is not None else []
    for fragment in fragments:
        end = fragment.param_offset + fragment.length
        spans.setdefault(fragment.entry.name, []).append((fragment.param_offset, end))
    return spans


def _overlapping(tensor: TensorEntry, spans: list[tuple[int, int]], *, same_shape: bool) -> Iterator[int]:
    """Yield the index of each file with elements of ``tensor`` in ``spans``, ranges [first, end) of its parameter.
    Unless ``same_shape``, of all its files: scalars and scales have other elements than the parameter."""
    for piece in tensor.slices:
        end = piece.offset + piece.length
        if not same_shape or any(first < end and piece.offset < last for first, last in spans):
            yield piece.file
