"""Write one rank's files of a checkpoint of DeepSpeed from any source that has the tensors in full.

A template tensor stands for bytes that are written later: its own memory is never touched (see [Note: filled
templates]). A flat tensor is one rank's elements of the parameters of a param group, or at stage 3 of a sub-group, laid
end to end. `names` are names of parameters.

[Note: what DeepSpeed's files cannot say]
DeepSpeed keeps one step for all parameters of a group, and a state for every trained parameter. A parameter that never
had a gradient gets zeros, as it has there; where the steps of a group differ, all get the largest, which is logged, as
are frozen parameters that have states of earlier steps, which are left out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..torch.buffers import dtype_name, tensor_buffer, torch_dtype
from ..types import ITEMSIZE, is_optimizer_kind, numel, state_key, state_kind
from .composed import ComposedSource, ComposedTensor, GivenTensor
from .deepspeed_layout import (
    FlatGroup,
    alignment_gaps,
    partition_of_group,
    pieces_of_group,
    round_robin,
    sub_groups,
)
from .deepspeed_pickle import DeepSpeedObject, FragmentAddress, Pickling
from .filled import FileTemplate, empty_tensor, write_new
from .model import ModelTensor
from .sources import Source

logger = logging.getLogger("zero_ckpt")

_WORKERS = 4
_SHOWN = 3


@dataclass(frozen=True)
class DeepSpeedForm:
    """The content of a checkpoint of DeepSpeed besides its tensors.

    Attributes:
        stage: 1, 2 or 3.
        groups: the names of each param group's parameters, in the optimizer's order.
        options: the options of each group.
        bf16: whether the files of states are named as under bfloat16.
        sub_group_numel: elements of a rank that make a sub-group full, at stage 3.
        round_robin: whether parameters are ordered as `round_robin_gradients` does.
        aligned: whether they are padded as `parameter_alignment` does.
        left_out: names of buffers that the module's state dict does not have.
        scaler: the loss scale.
        optimizer: further entries of the optimizer's state.
        model: further entries of the model file, the user's among them; may hold tensors.
        beside: entries that both files have.
    """

    stage: int
    groups: Sequence[Sequence[str]]
    options: Sequence[Mapping[str, Any]]
    bf16: bool
    sub_group_numel: int
    round_robin: bool
    aligned: bool
    left_out: frozenset[str]
    scaler: DeepSpeedObject
    optimizer: Mapping[str, Any]
    model: Mapping[str, Any]
    beside: Mapping[str, Any]


def write_rank_files(source: Source, form: DeepSpeedForm, folder: Path, rank: int, ranks: int) -> None:
    """Write the files of `rank` of `ranks` into a new folder; they are on disk on return.

    Pieces of 8 MiB are in memory at a time. Raises CheckpointError for a parameter or state that DeepSpeed cannot hold,
    and for values in `form` that are no plain data or tensors.
    """
    files = _RankFiles(source, form, rank, ranks)
    if form.stage == 3 or rank == 0:
        prefix = f"zero_pp_rank_{rank}_" if form.stage == 3 else ""
        files.write(files.model(), folder / f"{prefix}mp_rank_00_model_states.pt")
    states = {"optimizer_state_dict": files.optimizer(), **form.beside}
    prefix = "bf16_" if form.bf16 else ""
    files.write(states, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


class _RankFiles:
    """The contents of one rank's files; the arguments are those of `write_rank_files`.

    The tensors in them are template tensors, whose bytes come from the source when a file is written.
    """

    def __init__(self, source: Source, form: DeepSpeedForm, rank: int, ranks: int) -> None:
        self._source, self._form, self._rank, self._ranks = source, form, rank, ranks
        self._places: dict[int, ModelTensor] = {}
        self._composed: dict[tuple[str, str], ComposedTensor] = {}
        self._given: dict[tuple[str, str], GivenTensor] = {}
        self._kinds: dict[str, dict[str, str]] = {}
        for name, kind in source.tensors:
            if is_optimizer_kind(kind):
                self._kinds.setdefault(name, {})[state_key(kind)] = kind
        self._groups = [self._ordered(group) for group in form.groups]
        self._trained = {name for group in self._groups for name in group}
        if rank == 0:
            self._warn_of_left_out()
        missing = [name for name in self._trained if (name, "param") not in source.tensors]
        if missing:
            raise CheckpointError(f"{missing[0]!r} of the optimizer is not among the model's parameters")

    def _warn_of_left_out(self) -> None:
        """Log which parameters have a master or states but are in no group, as happens if they are frozen after some
        steps; their states are not saved."""
        held = {name for name, kind in self._source.tensors if kind == "master" or is_optimizer_kind(kind)}
        left = sorted(held - self._trained)
        if left:
            logger.warning(
                "%d parameters (%s, for example) are frozen, but have states of earlier steps: DeepSpeed's files "
                "have no place for those, nor for a master, so a run that thaws them after loading begins theirs anew",
                *(len(left), ", ".join(left[:_SHOWN])),
            )

    def write(self, value: dict[str, Any], path: Path) -> None:
        """Write `value`, the content that `model` or `optimizer` returned or a dict that contains it, as a file to
        `path`."""
        found = list(_tensors(value))
        tensors = {str(number): self._places[id(tensor)] for number, tensor in enumerate(found)}
        source = ComposedSource(self._source, self._composed, self._given)
        template = FileTemplate(
            path, value, tensors, lambda loaded: {str(n): each for n, each in enumerate(_tensors(loaded))}, Pickling
        )
        write_new(source, template, workers=_WORKERS)

    def model(self) -> dict[str, Any]:
        """Return the content of the model file, as a dict by DeepSpeed's keys."""
        source, whole = self._source, self._form.stage < 3
        module: OrderedDict[str, torch.Tensor] = OrderedDict()
        frozen: OrderedDict[str, torch.Tensor] = OrderedDict()
        for (name, kind), tensor in source.tensors.items():
            if kind == "buffer" and name not in self._form.left_out:
                module[name] = self._from_source(name, kind)
            elif kind == "param":
                module[name] = self._from_source(name, kind) if whole else self._empty_template(tensor.dtype)
                if name not in self._trained:
                    frozen[name] = module[name] if whole else self._compose_pieces(f"frozen {name}", "param", [name])
        module.update({alias: module[name] for alias, name in source.aliases.items() if name in module})
        parts = [names for group in self._groups for names, _ in self._parts(group)]
        tied = source.aliases if self._rank == 0 else {}  # as there
        excluded = any((name, "param") not in source.tensors for name in source.frozen or ())
        return {
            "module": module,
            "buffer_names": [name for name, kind in source.tensors if kind == "buffer" and name in module],
            "optimizer": None,
            "param_shapes": [OrderedDict((name, self._shape(name)) for name in names) for names in parts],
            "frozen_param_shapes": None if excluded else OrderedDict((name, self._shape(name)) for name in frozen),
            "shared_params": {alias: name for alias, name in tied.items() if name in module},
            "frozen_param_fragments": None if excluded else frozen,  # DeepSpeed takes every frozen one from a map
            "dp_world_size": self._ranks,
            **self._form.beside,
            **self._with_templates(dict(self._form.model)),
        }

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's part of the file of states, as a dict by DeepSpeed's keys: masters, states and
        options.
        """
        form, stage3 = self._form, self._form.stage == 3
        flats: list[FlatGroup] = []
        masters, states, options = [], {}, []
        for number, group in enumerate(self._groups):
            first = len(flats)
            for names, flat in self._parts(group):
                index = len(flats)
                flats.append(flat)
                length = flat.numel - flat.padding  # those of states are padded
                masters.append(self._compose(str(index), "master", flat, self._weight_kinds(names), length))
                if state := self._states_of_flat(index, names, flat):
                    states[index] = state
            options.append(
                {**self._with_templates(dict(form.options[number])), "params": list(range(first, len(flats)))}
            )
        inner = {"state": states, "param_groups": options}
        common = {"zero_stage": form.stage, "loss_scaler": form.scaler, **form.optimizer}
        if stage3:
            counted = {"partition_count": self._ranks}
            return {**common, **counted, "optimizer_state_dict": inner, "fp32_flat_groups": masters}
        return {
            **common,
            "base_optimizer_state": inner,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": [flat.padding for flat in flats],
            "param_alignment_paddings": [self._gaps(group) for group in self._groups],
            "partition_count": [self._ranks] * len(self._groups),
            "param_slice_mappings": [_addresses(names, flat) for names, flat in zip(form.groups, flats, strict=True)],
        }

    def _ordered(self, names: Sequence[str]) -> list[str]:
        """Return the parameters `names` of a group in the order of the group's flat tensor. Raises CheckpointError for
        an empty group."""
        if not names:
            raise CheckpointError("a param group without trained parameters has no place in a checkpoint of DeepSpeed")
        return round_robin(names, self._ranks) if self._form.round_robin and self._form.stage < 3 else list(names)

    def _parts(self, group: Sequence[str]) -> Iterator[tuple[list[str], FlatGroup]]:
        """Yield (parameter names, this rank's flat tensor) for each sub-group of a group; below stage 3 for the group
        itself."""
        numels = [self._numel(name) for name in group]
        if self._form.stage < 3:
            flat = partition_of_group(group, numels, self._gaps(group), self._rank, self._ranks)
            yield list(group), flat
            return
        for names in sub_groups(group, numels, self._ranks, self._form.sub_group_numel):
            sizes = [self._numel(name) for name in names]
            yield names, pieces_of_group(names, sizes, self._rank, self._ranks)

    def _gaps(self, group: Sequence[str]) -> list[int]:
        """Return the elements of padding behind each parameter of `group`, the names of a group."""
        itemsize = ITEMSIZE[self._source.tensors[group[0], "param"].dtype]
        return alignment_gaps([self._numel(name) for name in group], itemsize, aligned=self._form.aligned)

    def _states_of_flat(self, index: int, names: Sequence[str], flat: FlatGroup) -> dict[str, Any]:
        """Return the optimizer states of this rank's flat tensor `flat` by key; empty where none of the parameters
        `names` in it has any. `index` is its number among the rank's flat tensors.

        Raises CheckpointError for a state that is not elementwise.
        """
        keys = dict.fromkeys(key for name in names for key in self._kinds.get(name, {}))
        state: dict[str, Any] = {}
        for key in keys:
            kinds = {name: self._kinds[name][key] for name in names if key in self._kinds.get(name, {})}
            if key == "step" or all(kind.endswith(".scalar") for kind in kinds.values()):
                state[key] = self._shared_number(key, kinds)
                continue
            for name, kind in kinds.items():
                if tuple(self._source.tensors[name, kind].shape) != tuple(self._shape(name)):
                    raise CheckpointError(
                        f"{name!r}: state {kind!r} of shape {tuple(self._source.tensors[name, kind].shape)} is not "
                        "elementwise, so no checkpoint of DeepSpeed can hold it; save with checkpoint.format native"
                    )
            state[key] = self._compose(f"{index}", state_kind(key), flat, kinds, flat.numel)
        return state

    def _shared_number(self, key: str, kinds: Mapping[str, str]) -> Any:
        """Return the one value that a group stores for a one-element state of all its parameters: the largest where
        they differ, which is logged. It is an int for a step.

        `key` names the state; `kinds` has its kind in the source by parameter.
        """
        values = {name: self._read_number(name, kind) for name, kind in kinds.items()}
        largest = max(values.values())
        others = [name for name, value in values.items() if value != largest]
        if others and self._rank == 0:
            logger.warning(
                "%d parameters (%s, for example) have another %s than %s: a checkpoint of DeepSpeed has one for their "
                "param group, %s",
                *(len(others), ", ".join(others[:_SHOWN]), key, next(n for n, v in values.items() if v == largest)),
                largest,
            )
        return int(largest) if key == "step" else largest

    def _read_number(self, name: str, kind: str) -> float:
        """Return the one-element state `kind` of parameter `name` as a number."""
        dtype = self._source.tensors[name, kind].dtype
        raw = bytearray(ITEMSIZE[dtype])
        self._source.read_into(name, kind, 0, raw)
        return float(torch.frombuffer(raw, dtype=torch_dtype(dtype)))

    def _weight_kinds(self, names: Iterable[str]) -> dict[str, str]:
        """Return the kind of each parameter's weights in the highest precision, by name: "master", or "param" where
        there is none."""
        return {name: "master" if (name, "master") in self._source.tensors else "param" for name in names}

    def _compose_pieces(self, place: str, kind: str, names: Sequence[str]) -> torch.Tensor:
        """Return a template tensor for this rank's padded pieces, as at stage 3, of the tensors of `kind` of the
        parameters `names`. `place` is a name that no other template tensor has."""
        flat = pieces_of_group(names, [self._numel(name) for name in names], self._rank, self._ranks)
        return self._compose(place, kind, flat, dict.fromkeys(names, kind), flat.numel)

    def _compose(self, place: str, kind: str, flat: FlatGroup, kinds: Mapping[str, str], length: int) -> torch.Tensor:
        """Return a template tensor for the first `length` elements of the flat tensor `flat`. `kinds` maps its
        parameters to the kinds of the tensors to take; (`place`, `kind`) is a key that no other template tensor has.

        Raises CheckpointError where the dtypes of these tensors differ.
        """
        dtypes = {name: self._source.tensors[name, found].dtype for name, found in kinds.items()}
        name, dtype = next(iter(dtypes.items()))
        other = next((other for other, its in dtypes.items() if its != dtype), None)
        if other is not None:
            raise CheckpointError(
                f"{name!r} ({kind}) is {dtype} and {other!r} is {dtypes[other]}, in one param group, for which a "
                "checkpoint of DeepSpeed has one dtype; save with checkpoint.format native"
            )
        key = f"\0{place}", kind
        self._composed[key] = ComposedTensor(length, dtype, flat.runs, kinds)
        return self._new_template(ModelTensor(*key, (length,), dtype, dtype))

    def _from_source(self, name: str, kind: str) -> torch.Tensor:
        """Return a template tensor for the tensor (`name`, `kind`) of the source."""
        tensor = self._source.tensors[name, kind]
        return self._new_template(ModelTensor(name, kind, tuple(tensor.shape), tensor.dtype, tensor.dtype))

    def _empty_template(self, dtype: str) -> torch.Tensor:
        """Return a template tensor without elements, as a module's state dict has for a sharded parameter."""
        self._given["\0nothing", dtype] = GivenTensor((0,), dtype, b"")
        return self._new_template(ModelTensor("\0nothing", dtype, (0,), dtype, dtype))

    def _with_templates(self, value: Any, path: str = "") -> Any:
        """Return a copy of `value` with a template tensor in place of each tensor in it, whose bytes are kept for
        writing. `path` names the value in errors. Raises CheckpointError for a set of tensors."""
        if isinstance(value, torch.Tensor):
            held = value.detach().cpu().contiguous()
            key = f"\0given {len(self._given)}", "param"
            dtype = dtype_name(held.dtype)
            self._given[key] = GivenTensor(tuple(held.shape), dtype, bytes(tensor_buffer(held)))
            return self._new_template(ModelTensor(*key, tuple(held.shape), dtype, dtype))
        if isinstance(value, dict):
            return {key: self._with_templates(item, f"{path}[{key!r}]") for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._with_templates(item, f"{path}[{n}]") for n, item in enumerate(value))
        if isinstance(value, (set, frozenset)) and any(isinstance(item, torch.Tensor) for item in value):
            raise CheckpointError(f"client state{path}: expected a list of tensors, got a {type(value).__name__}")
        return value

    def _new_template(self, member: ModelTensor) -> torch.Tensor:
        """Return a new template tensor that stands for the bytes of `member`."""
        tensor: torch.Tensor = empty_tensor(member)
        self._places[id(tensor)] = member
        return tensor

    def _shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter."""
        return torch.Size(self._source.tensors[name, "param"].shape)

    def _numel(self, name: str) -> int:
        """Return the elements of a parameter."""
        return numel(tuple(self._shape(name)))


def _addresses(names: Sequence[str], flat: FlatGroup) -> OrderedDict[str, FragmentAddress]:
    """Return, by name, where the parameters `names` of a group lie in `flat`, a rank's partition of the group; in the
    group's order, without parameters that have no elements there."""
    runs = {run.name: run for run in flat.runs}
    return OrderedDict(
        (name, FragmentAddress(numel=runs[name].length, start=runs[name].begin)) for name in names if name in runs
    )


def _tensors(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value` and in the dicts, lists and tuples in it, each once, in order; `seen` has the `id`
    of those that were yielded.
    """
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, seen)
