"""DeepSpeed checkpoints of stages 0 to 3 as a source: which bytes of which file make up which tensor.

Stages 1 and 2 split each parameter group's flat vector into one partition per rank. Stage 3 splits each parameter into
one piece per rank, padded at the end, and each rank lays its pieces end to end, group by group. A tag directory holds
one checkpoint: a model file per rank and, from stage 1 on, an optimizer file per rank. `Tensors` maps (name, kind) to
where a tensor's elements lie; kinds are `param`, `buffer`, `master` and optimizer states. Every tensor of `torch.save`
is read without its data, as a `Stored` position.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, DamagedError, NotPlainDataError
from ..plain import to_plain
from ..types import MODEL_KINDS, numel, state_kind
from .one_save import require_one_save
from .segments import Segment, SegmentedTensor, SegmentSource
from .torch_file import StandIn, Stored, load_structure, scalar, stored

_RANKED = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_MAX_ITEMS = 1 << 20
"""Of one value that is no tensor."""
OWN_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments data_sampler "
    "random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size checkpoint_parallel_dimensions "
    "ds_config ds_version universal_checkpoint_info sparse_tensor_module_names num_experts zero_nvme_offload".split()
)

Tensors = dict[tuple[str, str], SegmentedTensor]


class ModelFile:
    """The contents of the model file `path`, a `*_model_states.pt`, without its tensors' data.

    Raises CheckpointError for a file that is not read, and DamagedError when it is damaged or has no `module`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: Mapping[str, Any] = load_structure(path)
        if not isinstance(self.data, Mapping) or not isinstance(self.data.get("module"), Mapping):
            raise DamagedError(f"{path} is no model state file of DeepSpeed: it has no `module`")
        self.module: dict[str, torch.Tensor] = {
            name: value for name, value in self.data["module"].items() if isinstance(value, torch.Tensor)
        }
        self.buffers = frozenset(self.data.get("buffer_names") or ())

    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the shapes of trainable parameters by name, one dict per parameter group; empty where the file lists
        none."""
        return [{name: tuple(shape) for name, shape in group.items()} for group in self.data.get("param_shapes") or ()]

    def aliases(self) -> dict[str, str]:
        """Return tied names, each with the name under which the tensor is stored. Where the file does not list them,
        names of the same shape at the same bytes are tied."""
        listed = self.data.get("shared_params")
        if listed is not None:
            return dict(listed)
        seen: dict[tuple[int, tuple[int, ...]], str] = {}
        found = {}
        for name, tensor in self.module.items():
            if tensor.numel():
                first = seen.setdefault((stored(tensor, self.path).begin, tuple(tensor.shape)), name)
                if first != name:
                    found[name] = first
        return found

    def frozen(self) -> frozenset[str] | None:
        """Return the names of parameters that are in no param group; None where the file lists no groups (stage 0)."""
        trained = {name for group in self.shapes() for name in group}
        if not trained:
            return None
        every = frozenset(self.module).union(self.data.get("frozen_param_shapes") or ())
        return every - trained - self.buffers - set(self.aliases())

    def step(self) -> int:
        """Return the optimizer steps taken; 0 where the file does not say."""
        return int(self.data.get("global_steps") or 0)

    def client_state(self) -> dict[str, Any]:
        """Return the entries of the file that are plain data and not DeepSpeed's own. If other entries of the user
        cannot be converted, `not_converted` has their names."""
        plain: dict[str, Any] = {}
        left = []
        for key, value in self.data.items():
            if key not in OWN_KEYS and value is not None:
                try:
                    plain[str(key)] = to_plain(value, str(key), max_items=_MAX_ITEMS)
                except NotPlainDataError:
                    left.append(str(key))
        return {**plain, "not_converted": left} if left else plain


def open_deepspeed(directory: Path) -> SegmentSource:
    """Open one tag directory of a DeepSpeed checkpoint, of any ZeRO stage.

    Parameters of kind `param` are as the model used them, `master` is their fp32 copy where that differs in dtype;
    optimizer state follows for stages 1 to 3 (stage 0 does not record which state belongs to which parameter). Raises
    CheckpointError for tensor, pipeline and expert parallel checkpoints, and DamagedError when a file or a part of a
    tensor is missing or damaged.
    """
    models = open_models(directory)
    tensors = model_tensors(models[0])
    client = models[0].client_state()
    optimizers = optimizer_files(directory)
    if optimizers:
        states = [load_structure(path)["optimizer_state_dict"] for path in optimizers]
        _add_optimizers(tensors, models, states, optimizers)
        client.update(param_groups(states[0].get("base_optimizer_state", states[0].get("optimizer_state_dict"))))
    return assemble(tensors, models[0], client)


def open_models(directory: Path) -> list[ModelFile]:
    """Return the model files of a tag directory, by data-parallel rank. Raises DamagedError when a rank's is
    missing."""
    return [ModelFile(path) for path in _files_by_rank(directory, "*_model_states.pt", _MODEL)]


def open_model(directory: Path) -> ModelFile:
    """Return the model file of the first data-parallel rank of a tag directory, and read no other. Raises DamagedError
    when a rank's model file is missing or this one is damaged."""
    return ModelFile(_files_by_rank(directory, "*_model_states.pt", _MODEL)[0])


def optimizer_files(directory: Path) -> list[Path]:
    """Return the optimizer files of a tag directory, by data-parallel rank; none at stage 0. Raises DamagedError when a
    rank's is missing."""
    return _files_by_rank(directory, "*_optim_states.pt", _RANKED, required=False)


def model_tensors(model: ModelFile) -> Tensors:
    """Return the parameters and buffers that a model file holds in full, by (name, kind), each once though it may have
    several names."""
    aliases = model.aliases()
    tensors: Tensors = {}
    for name, tensor in model.module.items():
        if name not in aliases and (tensor.numel() or name in model.buffers):
            kind = "buffer" if name in model.buffers else "param"
            tensors[name, kind] = stored(tensor, model.path).whole()
    return tensors


def assemble(tensors: Tensors, model: ModelFile, client: dict[str, Any]) -> SegmentSource:
    """Return a source with the given tensors; `model` gives the step, tied and frozen names, `client` is its client
    state. Raises DamagedError when a parameter that the model file lists is missing, or the elements of a tensor are
    not all there."""
    known = {name for name, kind in tensors if kind in MODEL_KINDS}
    aliases = model.aliases()
    listed = [name for group in model.shapes() for name in group] + list(model.data.get("frozen_param_shapes") or {})
    missing = [name for name in listed if name not in known and name not in aliases]
    if missing:
        raise DamagedError(f"{model.path.parent}: {', '.join(missing)} is listed, but not there")
    kept = {alias: name for alias, name in aliases.items() if name in known}
    return SegmentSource(tensors, kept, model.step(), client, model.frozen())


def param_groups(optimizer: Any) -> dict[str, Any]:
    """Return `{"param_groups": [...]}`, the hyperparameters of an optimizer's state dict as far as they are plain data;
    empty for an object that has none."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return {}
    found: list[dict[str, Any]] = [{} for _ in groups]
    for plain, group in zip(found, groups, strict=True):
        for key, value in group.items():
            if key != "params":
                with suppress(NotPlainDataError):
                    plain[key] = to_plain(value, str(key), max_items=_MAX_ITEMS)
    return {"param_groups": found}


def _files_by_rank(directory: Path, pattern: str, name: re.Pattern[str], *, required: bool = True) -> list[Path]:
    """Return the files of a tag directory that match the glob `pattern`, by data-parallel rank. `name` has groups for
    rank and model-parallel rank.

    Raises CheckpointError for a name of a model-parallel rank or of unknown form, and DamagedError when a rank's file
    is missing or, if `required`, there are none.
    """
    found: dict[int, Path] = {}
    for path in directory.glob(pattern):
        match = name.fullmatch(path.name)
        if match is None or int(match[2]) != 0:
            raise CheckpointError(f"{path}: tensor, pipeline and expert parallel checkpoints are not read")
        found[int(match[1] or 0)] = path
    if (required and not found) or sorted(found) != list(range(len(found))):
        raise DamagedError(f"{directory}: of {pattern} only the ranks {sorted(found)} are there")
    return [found[rank] for rank in sorted(found)]


def _add_optimizers(
    tensors: Tensors, models: Sequence[ModelFile], states: Sequence[Mapping[str, Any]], paths: Sequence[Path]
) -> None:
    """Add masters and optimizer state to `tensors`, at stage 3 also frozen parameters. `paths` are the ranks' optimizer
    files, `states` their contents, and `models` the ranks' model files.

    A master becomes the `param` where the model uses fp32. Raises DamagedError when another number of ranks wrote the
    files, or they are of two saves.
    """
    model = models[0]
    stage = _number(states[0].get("zero_stage", 1))
    counts = states[0].get("partition_count", len(paths))
    expected = max(counts) if isinstance(counts, list) else counts
    if expected != len(paths):
        raise DamagedError(f"{paths[0].parent}: {len(paths)} optimizer files, {expected} ranks wrote it")
    require_one_save([(each.path, each.data) for each in models], list(zip(paths, states, strict=True)))
    if stage >= 3:
        flats = _stage3(model, states, paths)
        add_frozen(tensors, models)
    else:
        flats = _stage12(model, states, paths)
    for (name, kind), tensor in flats.items():
        used = model.module[name].dtype if name in model.module else torch.float32
        if kind != "master":
            tensors[name, kind] = tensor
        elif used == torch.float32:
            tensors[name, "param"] = tensor
        else:
            tensors[name, "master"] = tensor


def _number(value: Any) -> int:
    """Return `value` as an integer; of a `StandIn` for an enum, its first argument."""
    return int(value.arguments[0]) if isinstance(value, StandIn) else int(value)


def _tensor_list(state: Mapping[str, Any], key: str, path: Path) -> list[torch.Tensor]:
    """Return the list of tensors under `key` of a rank's optimizer state. Raises CheckpointError, naming `path`, if
    there is no such list."""
    found = state.get(key)
    if not isinstance(found, list) or not all(isinstance(tensor, torch.Tensor) for tensor in found):
        raise CheckpointError(
            f"{path} has no list of tensors {key!r}; it is not a ZeRO optimizer file that is read here"
        )
    return found


def _values_by_kind(states: Sequence[Mapping[str, Any]], group: int, key: str, fp32: str) -> dict[str, list[Any]]:
    """Return the values that the ranks hold of parameter group number `group`, by kind: a list by rank of flat tensors
    or numbers. `states` are the contents of the ranks' optimizer files.

    The kinds are `master`, from the list under the key `fp32` of a file, and every optimizer state of the state dict
    under `key`. Raises CheckpointError for an elastic state of early versions.
    """
    found: dict[str, list[Any]] = {"master": [state[fp32][group] for state in states]}
    base = [state[key] for state in states]
    if not all(isinstance(part, Mapping) and "state" in part for part in base):
        raise CheckpointError("elastic optimizer states of early versions of DeepSpeed are not read")
    for kind, value in base[0]["state"].get(group, {}).items():
        if value is not None:  # torch's SGD without momentum
            found[state_kind(kind)] = [part["state"][group][kind] for part in base]
    return found


def _is_flat(values: Sequence[Any]) -> bool:
    """Return whether all values are 1-dimensional tensors."""
    return all(isinstance(value, torch.Tensor) and value.ndim == 1 for value in values)


def _stage12(model: ModelFile, states: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> Tensors:
    """Return masters and optimizer states of stages 1 and 2, by (name, kind). `paths` are the ranks' optimizer files,
    `states` their contents; `model` gives the order and shapes of parameters."""
    tensors: Tensors = {}
    key = "single_partition_of_fp32_groups"
    flats = [_tensor_list(state, key, path) for state, path in zip(states, paths, strict=True)]
    paddings = states[0].get("param_alignment_paddings")
    for group, shapes in enumerate(model.shapes()):
        gaps = paddings[group] if paddings else [0] * len(shapes)
        fp32 = [flat[group] for flat in flats]
        for kind, values in _values_by_kind(states, group, "base_optimizer_state", key).items():
            if not _is_flat(values):
                tensors.update({(name, kind): scalar(values[0], paths[0]) for name in shapes})
                continue
            parts = [stored(value, path) for value, path in zip(values, paths, strict=True)]
            lengths = [flat.numel() for flat in fp32]  # states may lack the padding at the end of a partition
            position = 0
            for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
                segments = tuple(_segments_in(parts, lengths, position, numel(shape)))
                tensors[name, kind] = SegmentedTensor(shape, parts[0].dtype, segments)
                position += numel(shape) + gap
    return tensors


def _segments_in(parts: Sequence[Stored | None], lengths: Sequence[int], begin: int, length: int) -> Iterator[Segment]:
    """Yield the segments of a tensor that is elements `begin` to `begin + length` of the tensors `parts`, laid end to
    end; the segments' offsets count from `begin`.

    Each of `parts` takes up as many elements as its entry of `lengths` says; it may hold fewer, or, if it is None,
    none.
    """
    position = 0
    for part, room in zip(parts, lengths, strict=True):
        low, high = max(begin, position), min(begin + length, position + (0 if part is None else part.numel))
        if part is not None and low < high:
            yield part.segment(low - begin, low - position, high - low)
        position += room


def _stage3(model: ModelFile, states: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> Tensors:
    """Return masters and optimizer states of stage 3, by (name, kind). `paths` are the ranks' optimizer files, `states`
    their contents; `model` gives the order and shapes of parameters."""
    tensors: Tensors = {}
    flats = [_tensor_list(state, "fp32_flat_groups", path) for state, path in zip(states, paths, strict=True)]
    lengths = [[flat.numel() for flat in own] for own in flats]
    by_group = [
        _values_by_kind(states, group, "optimizer_state_dict", "fp32_flat_groups") for group in range(len(flats[0]))
    ]
    strings = {kind: _flat_tensors(by_group, kind, paths) for kind in dict.fromkeys(chain.from_iterable(by_group))}
    ends = list(accumulate(lengths[0]))
    position = 0
    for name, shape in ((name, shape) for group in model.shapes() for name, shape in group.items()):
        piece = -(-numel(shape) // len(states))
        kinds = by_group[min(bisect_right(ends, position), len(ends) - 1)]
        for kind, values in kinds.items():
            if not _is_flat(values):
                tensors[name, kind] = scalar(values[0], paths[0])
                continue
            segments = [
                Segment(rank * piece + segment.offset, segment.length, segment.file, segment.begin)
                for rank, parts in enumerate(strings[kind])
                for segment in _segments_in(
                    parts, lengths[rank], position, max(0, min(piece, numel(shape) - rank * piece))
                )
            ]
            tensors[name, kind] = SegmentedTensor(shape, stored(values[0], paths[0]).dtype, tuple(segments))
        position += piece
    return tensors


def _flat_tensors(
    by_group: Sequence[Mapping[str, list[Any]]], kind: str, paths: Sequence[Path]
) -> list[list[Stored | None]]:
    """Return, for each rank, a list with its flat tensor of `kind` for each parameter group; None for groups that have
    no such state.

    `by_group` has the ranks' values by kind, per group (see `_values_by_kind`); `paths` are the ranks' files.
    """
    flat = [found[kind] if _is_flat(found.get(kind, [None])) else None for found in by_group]
    return [[None if own is None else stored(own[rank], path) for own in flat] for rank, path in enumerate(paths)]


def add_frozen(tensors: Tensors, models: Sequence[ModelFile]) -> None:
    """Add those frozen parameters to `tensors` that it lacks, each joined from its fragments in the ranks' model
    files."""
    for name, shape in (models[0].data.get("frozen_param_shapes") or {}).items():
        if (name, "param") in tensors:
            continue
        parts = [stored(model.data["frozen_param_fragments"][name], model.path) for model in models]
        segments = tuple(_segments_in(parts, [part.numel for part in parts], 0, numel(tuple(shape))))
        tensors[name, "param"] = SegmentedTensor(tuple(shape), parts[0].dtype, segments)
