"""Tensor and sequence parallelism as an mpu describes them (the model-parallel object of DeepSpeed and Megatron). With
tensor parallelism the model has several parts; each is trained, and its states sharded, by its own ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero_ckpt import CheckpointError, Coordinator, MismatchError
from zero_ckpt.coordination import run_on_all_ranks
from zero_ckpt.torch import DistCoordinator
from zero_comm import Control, Message, open_group, starting_together
from zero_partition import ModelParts, TensorParallelModel, UnsplitModel

from .errors import UsageError

_TENSOR_PARALLEL = ("get_tensor_model_parallel_", "get_slice_parallel_", "get_model_parallel_")
_PART = "mp_rank_{}"
_OTHER_AXES = {
    "get_pipeline_model_parallel_world_size": "pipeline parallelism",
    "get_pipe_parallel_world_size": "pipeline parallelism",
    "get_expert_model_parallel_world_size": "expert parallelism",
    "get_context_parallel_world_size": "context parallelism",
}


@dataclass(frozen=True)
class ModelParallel:
    """The part of the model that this rank trains, ``rank`` of ``size``: its tensor-parallel slice of the layers.
    ``data_rows``, ``model_rows``: the global ranks of every data-parallel (with all sequences) and of every
    model-parallel group; each rank is in one row of each. ``group``: the mpu's own model-parallel group; None without
    an mpu. ``sequence_size``: the consecutive ranks of a data-parallel row that share a sequence."""

    rank: int
    size: int
    data_rows: Sequence[Sequence[int]]
    model_rows: Sequence[Sequence[int]]
    group: dist.ProcessGroup | None = None
    sequence_size: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of ranks that train the same part of the model as this one."""
        return len(self.data_rows[0])

    def check_sequence(self, size: int) -> None:
        """Raise `UsageError` unless ``size``, the configuration's ``sequence_parallel_size``, is also the mpu's."""
        if size != self.sequence_size:
            raise UsageError(
                f"sequence_parallel_size is {size} in the configuration, but {self.sequence_size} by the mpu: give "
                f"initialize(mpu=…) groups of {size} ranks (get_sequence_parallel_world_size), as "
                "zero_sequence.SequenceGroups does, or set sequence_parallel_size to the mpu's"
            )

    def open(self) -> ModelPart:
        """Open the process groups that connect the parts, if there are several; return this rank's part. Collective."""
        if self.size == 1:
            return ModelPart(self, UnsplitModel(), None)
        control = Control(open_group(self.model_rows, "gloo"))
        everybody = Control(open_group([[rank for row in self.data_rows for rank in row]], "gloo"))
        return ModelPart(self, TensorParallelModel(control), everybody)


class ModelPart:
    """This rank's part of the model in one engine: its gradient norm, its files, its agreement with other parts.
    ``everybody``: carries messages among the ranks of all parts; None if there is one part.

    Attributes:
        place: the part's number and its ranks.
        norms: combines the gradient norms of all parts."""

    def __init__(self, place: ModelParallel, norms: ModelParts, everybody: Control | None) -> None:
        self.place = place
        self.norms = norms
        self._everybody = everybody

    @property
    def coordinator(self) -> Coordinator | None:
        """Return the checkpoint coordinator of the ranks of all parts; None if there is one part."""
        return None if self._everybody is None else DistCoordinator(self._everybody.process_group)

    def subfolder(self, root: Path) -> Path:
        """Return where this part's files are: ``root`` if there is one part, else its subfolder ``mp_rank_XX``."""
        return root / _PART.format(f"{self.place.rank:02d}") if self.place.size > 1 else root

    def folder(self, root: Path, *, make: bool = False) -> Path:
        """Return the folder of this part's checkpoints: ``root``, or with several parts a subfolder, which ``make``
        creates. Raises `MismatchError` on every rank if ``root`` holds checkpoints of another number of parts.
        Collective."""
        part, parts = self.subfolder(root), root.glob(_PART.format("*"))
        told = self._tell("folder", {path.name: any(path.glob("*")) for path in parts})
        found = len({name for names in told for name in names}) if any(any(names.values()) for names in told) else 0
        if found not in (0, 0 if self._everybody is None else self.place.size):
            raise MismatchError(
                f"{root} holds checkpoints of a model in {found} parts ({_PART.format('00')} and so on), but the model "
                f"here has {self.place.size}: give initialize the mpu that they were written with"
            )
        if make and (coordinator := self.coordinator) is not None:
            run_on_all_ranks(coordinator, f"making {root}", lambda: part.mkdir(parents=True, exist_ok=True))
        return part

    @contextmanager
    def share_failure(self, call: str) -> Iterator[None]:
        """If the block raises `CheckpointError` in one part, raise it in all parts, with ``call`` in it. Collective."""
        failure: CheckpointError | None = None
        try:
            yield
        except CheckpointError as error:
            failure = error
        told = self._tell(call, None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for reason in filter(None, told):
            raise CheckpointError(f"{call} failed in another part of the model: {reason}")

    def _tell(self, call: str, payload: Any) -> list[Any]:
        """Return the ``payload`` of every rank of all parts, by rank; only this rank's if there is one part. ``call``:
        the engine's call, which must be the same on all of them. Collective."""
        return [payload] if self._everybody is None else self._everybody.agree(Message(call, "", 0, payload))

    def abort(self, failure: BaseException) -> None:
        """Make collectives between the parts raise on all of their ranks, with ``failure`` as the cause."""
        reason = f"{type(failure).__name__}: {failure}"
        self.norms.abort(reason)
        if self._everybody is not None:
            self._everybody.abort(reason)

    def close(self) -> None:
        """Close the process groups that connect the parts; `norms` and `coordinator` must not be used afterwards."""
        self.norms.close()
        if self._everybody is not None:
            self._everybody.close()


def model_parallel(mpu: Any) -> ModelParallel:
    """Return this rank's part of the model, as ``mpu`` describes it; the full model if it is None. Collective. Reads
    ``get_data_parallel_group()`` and the group, rank and world size called ``tensor_model_parallel``,
    ``slice_parallel`` or ``model_parallel``, the first that exists; if ``get_sequence_parallel_world_size()`` is above
    1, ``get_sequence_parallel_group()`` and ``get_sequence_data_parallel_group()`` instead of the data-parallel group.
    Raises on every rank: `UsageError` if one of these methods is missing or raises, for groups that form no grid, and
    for pipeline, expert or context parallelism; `DesyncError` or `PeerError` if only some ranks have an mpu."""
    with starting_together("initialize(mpu=…)", alike="None" if mpu is None else "an mpu"):
        world = list(range(dist.get_world_size()))
    if mpu is None:
        return ModelParallel(0, 1, [world], [[rank] for rank in world])
    control = Control(open_group([world], "gloo"))
    own, cause = None, None
    try:
        try:
            own = _own_rows(mpu)
            answer: Any = [own.data_rows[0], own.model_rows[0]]
        except Exception as error:
            said = f"on rank {dist.get_rank()} it raised {type(error).__name__}: {error}"
            cause, answer = error, str(error) if isinstance(error, UsageError) else said
        told = [message.payload for message in control.exchange(Message("initialize", "mpu", 0, answer))]
    finally:
        control.close()
    refusal = next((said for said in told if isinstance(said, str)), None) or _misfit(told)
    if own is None or refusal:
        raise UsageError(f"mpu: {refusal}") from cause
    data_rows, model_rows = (sorted({tuple(rows[axis]) for rows in told}) for axis in (0, 1))
    return replace(own, data_rows=data_rows, model_rows=model_rows)


def model_parallel_group(mpu: Any) -> dist.ProcessGroup | None:
    """Return the mpu's tensor-parallel group, under any of its names; None if ``mpu`` is None. Raises `UsageError` if
    it has none."""
    group: dist.ProcessGroup | None = None if mpu is None else _read(mpu, "group")
    return group


def _read(mpu: Any, what: str) -> Any:
    """Return what the mpu's getter ``get_..._parallel_`` + ``what`` returns ("rank", "world_size" or "group"), for the
    first kind of parallelism that it names. Raises `UsageError` if it has no such getter."""
    names = [prefix + what for prefix in _TENSOR_PARALLEL]
    for name in names:
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    raise UsageError(f"expected an mpu with {' or '.join(names)}, got {type(mpu).__name__}")


def _own_rows(mpu: Any) -> ModelParallel:
    """Return this rank's place by ``mpu``, with only this rank's own rows. Raises `UsageError` if getters are missing,
    contradict each other or name other axes; what getters raise propagates."""
    for name, axis in _OTHER_AXES.items():
        if (ranks := getattr(mpu, name, lambda: 1)()) > 1:
            raise UsageError(f"{name}() is {ranks}, but {axis} is not supported; tensor and sequence parallelism are")
    shared = int(getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)())
    getter = f"get_{'sequence_' if shared > 1 else ''}data_parallel_group"
    if not hasattr(mpu, getter):
        raise UsageError(f"expected an mpu with {getter}, got {type(mpu).__name__}")
    data = dist.get_process_group_ranks(getattr(mpu, getter)())
    start = data.index(dist.get_rank()) // shared * shared
    sequence = dist.get_process_group_ranks(mpu.get_sequence_parallel_group()) if shared > 1 else [data[start]]
    if sequence != data[start : start + shared]:
        raise UsageError(f"the ranks {sequence} that share a sequence must be {shared} consecutive ones of {data}")
    group = _read(mpu, "group")
    model = dist.get_process_group_ranks(group)
    rank, size = _read(mpu, "rank"), _read(mpu, "world_size")
    if size != len(model) or model.index(dist.get_rank()) != rank:
        raise UsageError(f"rank {rank} of {size} does not fit its model-parallel group of the global ranks {model}")
    return ModelParallel(rank, size, [data], [model], group, shared)


def _misfit(told: list[list[list[int]]]) -> str | None:
    """Return, as a message, why the groups form no grid with a data-parallel and a model-parallel axis; None if they
    do. ``told``: for each rank, the global ranks of its data-parallel and of its model-parallel group."""
    for rank, (data, model) in enumerate(told):
        for axis, row in (("data", data), ("model", model)):
            for other in row:
                theirs = told[other][0 if axis == "data" else 1]
                if theirs != row:
                    return f"rank {rank}'s {axis}-parallel group is {row}, rank {other}'s is {theirs}; they must be one"
        if set(data) & set(model) != {rank} or len(data) * len(model) != len(told):
            return (
                f"rank {rank}'s data-parallel group {data} and model-parallel group {model} must be a row and a column "
                f"of one grid of all {len(told)} ranks"
            )
    return None
