"""`Saver`: writes an engine's checkpoints, before `save` returns or in the background."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from zero_ckpt import AsyncSaver, CheckpointError, Coordinator, SoloCoordinator, save_sharded
from zero_ckpt.torch import DistCoordinator, RngState
from zero_ckpt.torch.state_kinds import unsavable
from zero_comm import destroy_group
from zero_offload import BudgetError, HostBudget
from zero_settings import absolute_path

from ..errors import UsageError
from ..offloading import Offloading
from ..state import TrainingState
from .intervals import StateIntervals
from .names import aliases, frozen_names, named_parameters, restructured
from .progress import progress_of
from .state_access import StateAccessGate
from .tier_files import TierFiles


class Dialect(Protocol):
    """Adds to checkpoints what readers of another library's checkpoints look for, or writes them in that library's
    format."""

    def writer(self, state: TrainingState) -> Callable[..., Path]:
        """Return the function that writes a checkpoint and takes the arguments of `zero_ckpt.save_sharded`. Called
        once, when the engine is made. Raises `UsageError` for a format that it does not write."""

    def client_state(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``given``, the user's client state, as a checkpoint holds it: plain data (JSON types and bytes)."""

    def files_beside(self, state: TrainingState, client_state: dict[str, Any]) -> Mapping[str, bytes]:
        """Return the contents, by name, of small files to write beside the checkpoint's own; ``client_state``: plain
        data."""


class OwnDialect:
    """A `Dialect` that adds nothing to checkpoints of this project's format."""

    def writer(self, state: TrainingState) -> Callable[..., Path]:
        """Return `save_sharded`. Raises `UsageError` if the configuration asks for another format."""
        if (asked := state.config.checkpoint.format) != "native":
            raise UsageError(
                f'checkpoint.format "{asked}" is for deepspeed.initialize (zero_deepspeed); set it to "native"'
            )
        return save_sharded

    def client_state(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of ``given``."""
        return dict(given)

    def files_beside(self, state: TrainingState, client_state: dict[str, Any]) -> Mapping[str, bytes]:
        """Return an empty dict: no files are added."""
        return {}


class Saver:
    """Writes an engine's checkpoints: before `save` returns, or in the background (``checkpoint.writer.decoupled``).
    A background save returns once the parameters that user code can write are copied into host memory, which is
    kept for the next save; the rest is copied during the next forward and backward pass (see `wait_for_copies`). A save
    that failed raises `zero_ckpt.CheckpointError` from the next `save`, `wait` or `close`."""

    def __init__(self, state: TrainingState, offloading: Offloading, dialect: Dialect) -> None:
        section = state.config.checkpoint
        self._state, self._offloading, self._dialect = state, offloading, dialect
        self._write = dialect.writer(state)
        self._decoupled, self._per_node = section.writer.decoupled, section.use_node_local_storage
        self._keep_last = section.keep_last
        self._config = state.config.to_plain()
        self._waited = 0.0
        self._states = StateAccessGate(self._await_copies)
        self._background_saver: AsyncSaver | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def is_writing(self) -> bool:
        """Return whether a background save is not complete."""
        return self._background_saver is not None and self._background_saver.is_busy

    def take_waited(self) -> float:
        """Return the seconds for which copies of saves have blocked this rank since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def save(
        self, root: Path, tag: str, client_state: Mapping[str, Any], *, save_latest: bool, exclude_frozen: bool
    ) -> None:
        """Write ``root/tag``, or begin to. ``save_latest``: name it in the file ``latest``. Collective. Raises
        `UsageError` on every rank inside an accumulation and for what no checkpoint can hold, `CheckpointError` for a
        save that failed."""
        client = self._dialect.client_state(client_state)
        state, parts = self._state, self._state.partition
        named = named_parameters(state.module)
        begun = state.sizes.steps > 1 and parts.runtime.held_gradients.awaits_step
        optimizer = state.optimizer
        fragments = () if optimizer is None else optimizer.fragments
        states = ((one.fragment.entry.name, optimizer.state_of(one)) for one in fragments if optimizer is not None)
        said = [state.counters.accumulated or int(begun), restructured(state, named), unsavable(states)]
        said.append(parts.added.digest())
        choice = f"{'' if save_latest else ', without latest'}{', without frozen parameters' if exclude_frozen else ''}"
        answers = parts.runtime.agree("save", f"{root}/{tag}{choice}", said)
        root = Path(absolute_path(root))  # the script may change its working directory before the files are written
        _refuse_inside_accumulation([accumulated for accumulated, *_ in answers], state)
        _refuse_restructured([name for _, name, *_ in answers])
        _refuse_unsavable([value for _, _, value, _ in answers])
        if len({digest for *_, digest in answers}) > 1:
            parts.added.refuse(parts.runtime.agree, "Nothing was saved.")
        parts.finish_updates()
        group = coordinator_of(state)
        node = socket.gethostname() if self._per_node else None
        leads = parts.data_rank == 0 if node is None else _is_first_of_node(group, node)
        files = TierFiles(state, self._offloading, root, durable=not self._decoupled)
        intervals = StateIntervals(
            *(state, files, exclude_frozen, named),
            replicated=leads,
            every_replica=node is not None,
            follow=self._decoupled,
        )
        intervals.settle_masters()

        def options() -> dict[str, Any]:
            """Return what to write besides tensors, as keyword arguments of `save_sharded`."""
            own = {"save_latest": save_latest, "node": node, "keep_last": self._keep_last}
            beside = self._dialect.files_beside(state, client)
            return checkpoint_options(state, client, named, self._config) | own | {"beside": beside}

        if self._decoupled:
            self._open_background_saver(group).save(
                *(root, tag, intervals.present()),
                memory=intervals.memory(),
                later_intervals=intervals.later,
                first=files.make_durable,
                meanwhile=options,
            )
            if state.optimizer is not None:
                self._states.block(state.optimizer.inner)
        else:
            self._write(root, tag, intervals.everything(), coordinator=group, **options())

    def wait_for_copies(self) -> None:
        """Wait until a running save has copied everything, after which shards, masters and states may be written."""
        self._await_copies()
        self._states.unblock()

    def _await_copies(self) -> None:
        """Wait until a running save has copied everything, and count the seconds for `take_waited`. Code that reads
        `optimizer.state` still waits afterwards."""
        if self._background_saver is not None:
            began = time.perf_counter()
            self._background_saver.copied()
            self._waited += time.perf_counter() - began

    @property
    def has_failed(self) -> bool:
        """Return whether a background save has failed with an error that was not raised yet."""
        return self._background_saver is not None and self._background_saver.has_failed

    def wait(self) -> None:
        """Wait until the running save, if any, is on disk. Raises `zero_ckpt.CheckpointError` if it failed."""
        if self._background_saver is not None:
            self._background_saver.wait()

    def close(self) -> None:
        """Finish the running save, and end its thread and process group. Raises `zero_ckpt.CheckpointError` if it
        failed. Idempotent."""
        self.wait_for_copies()
        if self._background_saver is not None:
            try:
                self._background_saver.close()
            finally:
                if self._group is not None:
                    destroy_group(self._group)
                self._group = None

    def _open_background_saver(self, group: Coordinator) -> AsyncSaver:
        """Return the background saver, which the first call makes, with a process group of its own. Collective then.
        ``group``: the coordinator of saves that block."""
        if self._background_saver is None:
            own: Coordinator = SoloCoordinator()
            if group.world_size > 1:
                self._group = own_group(self._state)
                own = DistCoordinator(self._group)
            self._background_saver = AsyncSaver(own, allow=check_room)
            weakref.finalize(self, self._background_saver.close)  # a script may end without `engine.destroy()`
        return self._background_saver


def check_room(nbytes: int) -> None:
    """Raise `zero_ckpt.CheckpointError` if host memory has no room for ``nbytes``, a copy of this rank's state."""
    budget = HostBudget(processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    budget.need("the copy of the state that is written in the background", nbytes)
    try:
        budget.check()
    except BudgetError as problem:
        raise CheckpointError(
            f"{problem}\nGive the job more memory, or have checkpoints written before training continues: "
            '"checkpoint": {"writer": {"decoupled": false}, "in_memory": {"every": 0}}'
        ) from problem


def checkpoint_options(
    state: TrainingState, client: dict[str, Any], named: Mapping[str, nn.Parameter], config: dict[str, Any]
) -> dict[str, Any]:
    """Return what a checkpoint holds besides tensors, as keyword arguments of `save_sharded`. ``client``: the user's
    client state; ``named``: the model's `named_parameters`; ``config``: the configuration as plain data."""
    return {
        "step": state.counters.global_steps,
        "aliases": aliases(named),
        "frozen": frozen_names(named),
        "client_state": progress_of(state, client),
        "config": config,
        "rank_state": {"random": RngState().state_dict()},
    }


def own_group(state: TrainingState) -> dist.ProcessGroup:
    """Return a new gloo group (fake in a fake world) of the engine's ranks, for a background thread. Collective over
    the world: torch names a group that only its members make after its ranks, so that a second one of the same ranks
    would use addresses that the first has left in the store."""
    backend = "fake" if dist.get_backend() == "fake" else "gloo"
    made = {row: dist.new_group(list(row), backend=backend) for row in map(tuple, state.model_part.place.data_rows)}
    group: dist.ProcessGroup = next(group for row, group in made.items() if dist.get_rank() in row)
    return group


def _refuse_inside_accumulation(accumulated: list[int], state: TrainingState) -> None:
    """Raise `UsageError` if a rank is inside an accumulation; ``accumulated``: its micro-batches so far, by rank."""
    if any(accumulated):
        raise UsageError(
            f"save_checkpoint was called after {max(accumulated)} of {state.sizes.steps} "
            "micro-batches of an accumulation, whose gradients a checkpoint does not hold: a resumed run would "
            "continue without them. Save after the step that ends the accumulation, or end it before: after "
            "engine.set_gradient_accumulation_boundary(True) the next step acts"
        )


def _refuse_restructured(names: list[str]) -> None:
    """Raise `UsageError` if a rank's model has other parameters than the engine; ``names``: by rank, text on one or
    ""."""
    other = next(filter(None, names), "")
    if other:
        raise UsageError(
            f"save_checkpoint: {other}, so the checkpoint would not hold what forward computes with. Copy values into "
            "the parameter instead of assigning a new one, reparametrize the model before it is given to the engine, "
            "or create the engine again. engine.consolidated_state_dict() has the weights of the model as it is."
        )


def _refuse_unsavable(values: list[str]) -> None:
    """Raise `UsageError` if a rank has states that no checkpoint can hold; ``values``: by rank, text on one or ""."""
    value = next(filter(None, values), "")
    if value:
        raise UsageError(
            f"save_checkpoint: the optimizer's state {value}, expected tensors, numbers, or lists of these. Keep "
            "anything else outside optimizer.state, and give it to save_checkpoint(client_state=…)"
        )


def coordinator_of(state: TrainingState) -> Coordinator:
    """Return the checkpoint coordinator of the engine's ranks; a solo one for a single rank."""
    group = state.partition.groups.control.process_group
    return SoloCoordinator() if group is None else DistCoordinator(group)


def _is_first_of_node(group: Coordinator, node: str) -> bool:
    """Return whether no lower rank is on the same ``node`` (host name) as this one. Collective."""
    nodes: list[str] = group.all_gather_object(node)
    return nodes.index(node) == group.rank
