"""Write a DeepSpeed universal checkpoint, piece by piece.

`zero/<name>/` holds `fp32.pt` and one file per optimizer state; `zero/optimizer_state.pt` and the model state file hold
what DeepSpeed keeps once. The same directory loads at stages 1, 2 and 3. `names` are the trained parameters, `record`
is the progress of this conversion, with what an earlier run has written, and `progress` is called with bytes written.
"""

from __future__ import annotations

import io
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..checksum import checksum
from ..commit import exists, remove_tree, staging_path
from ..durable import make_directories, replace_durably, sync_directories
from ..errors import CheckpointError
from ..filing import share_file, sync_file
from ..locking import root_lock
from ..types import is_optimizer_kind, numel, state_key
from .checks import refuse_existing, require_folder
from .dtypes import output_dtype
from .filled import FileTemplate, empty_tensor, write_filled
from .model import ModelTensor
from .pytorch_sink import read_model_tensor
from .record import ConversionRecord
from .replacing import put_in_place, recover
from .sources import Progress, Source
from .training_state import IMPLEMENTATION

_WRITTEN_FOR = "0.19.8"


def write_universal(source: Source, root: Path, *, workers: int, progress: Progress, overwrite: bool = False) -> Path:
    """Write the tensors of `source` as a universal checkpoint in the directory `<root>/global_step<step>`, point
    `<root>/latest_universal` at it, and return the directory's path.

    Hyperparameters come from `param_groups` in the source's client state, or from an optimizer that `zero_ckpt.save`
    stored; without either the target run's own configuration stays in force. Trained parameters that never had a
    gradient get zeros as their state, which is what DeepSpeed gives them. Memory is bounded by `workers` times 64 MiB;
    `progress` is called with bytes written, from several threads. An interrupted run resumes (see [Note: records of
    conversions]), and one that dies loses no earlier output (see [Note: replaced directories]). Raises CheckpointError
    when the source holds no optimizer state or state that DeepSpeed cannot partition, or the directory exists and
    `overwrite` is not given.
    """
    tag, names = f"global_step{source.step}", _trainable(source)
    staging, latest = staging_path(root, tag, "conversion"), root / "latest_universal"
    require_folder(root / tag)
    recover(root, tag)
    refuse_existing(root / tag, overwrite)
    make_directories(root)
    record = ConversionRecord(
        root / f".{tag}.conversion", checksum(repr((source.fingerprint, names, _WRITTEN_FOR)).encode())
    )
    try:
        if record.is_new:
            remove_tree(staging)
        _write_parameters(source, names, staging / "zero", record, workers, progress)
        _save(_optimizer_state(source, names), staging / "zero" / "optimizer_state.pt")
        _write_model_files(source, names, staging, record, workers, progress)
        sync_directories(staging)
        record.forget()
        with root_lock(root):
            refuse_existing(root / tag, overwrite)
            if not exists(latest):  # a run that dies before the end of this block can start again
                replace_durably(latest, tag.encode())
            put_in_place(staging, root / tag)
            replace_durably(latest, tag.encode())
    except BaseException as error:
        if isinstance(error, Exception):
            remove_tree(staging)
        record.close(keep=not isinstance(error, Exception))  # an interrupted run can resume
        raise
    remove_tree(staging)
    record.close(keep=False)
    return root / tag


def _trainable(source: Source) -> list[str]:
    """Return the names of trained parameters, in the source's order. Where the source does not say which are trained,
    they are those with optimizer state.

    Raises CheckpointError when there is no optimizer state at all.
    """
    stateful = {name for name, kind in source.tensors if is_optimizer_kind(kind)}
    names = list(dict.fromkeys(name for name, kind in source.tensors if kind in ("param", "master")))
    if not stateful.intersection(names):
        raise CheckpointError("the source holds no optimizer state, which a universal checkpoint is made of")
    return [name for name in names if (name in stateful if source.frozen is None else name not in source.frozen)]


def _write_parameters(
    source: Source, names: list[str], folder: Path, record: ConversionRecord, workers: int, progress: Progress
) -> None:
    """Write the files of the parameters `names` below `folder`, `workers` parameters at a time. Raises the first
    exception of any of them.

    What `record` has from an earlier run is not written again.
    """
    kinds = _moments(source, names)
    step = _common_step(source, names)
    with ThreadPoolExecutor(workers, thread_name_prefix="zero-ckpt-universal") as pool:
        jobs = [
            pool.submit(_write_parameter, source, name, folder / _folder(name), kinds, step, record, progress)
            for name in names
        ]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _moments(source: Source, names: list[str]) -> dict[str, str]:
    """Return the kinds of optimizer state, except the step, that any of the parameters `names` has, each with the dtype
    of its first tensor."""
    found: dict[str, str] = {}
    for name in names:
        for kind in _state_kinds(source, name):
            if state_key(kind) != "step":
                found.setdefault(kind, source.tensors[name, kind].dtype)
    return found


def _folder(name: str) -> str:
    """Return the name of the directory of a parameter, which is the parameter's name. Raises CheckpointError when that
    cannot be a directory's name."""
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise CheckpointError(f"{name!r} cannot be a directory of a universal checkpoint")
    return name


def _write_parameter(
    source: Source,
    name: str,
    folder: Path,
    moments: dict[str, str],
    step: Any,
    record: ConversionRecord,
    progress: Progress,
) -> None:
    """Write the files of parameter `name` into `folder`. `moments` maps kinds of state to dtypes; those that the
    parameter lacks are written as zeros.

    `step` is written if the parameter has none of its own; None writes none. What `record` has from an earlier run is
    not written again. Raises CheckpointError for an empty parameter, and for state of another shape than the
    parameter's.
    """
    kind = "master" if (name, "master") in source.tensors else "param"
    tensor = source.tensors[name, kind]
    shape = _shape(source, name)
    files = {"fp32": ModelTensor(name, kind, shape, tensor.dtype, output_dtype(tensor.dtype, "F32"))}
    for other, dtype in moments.items():
        files[other] = ModelTensor(name, other, shape, dtype, dtype)
    for other in _state_kinds(source, name):
        own = source.tensors[name, other]
        if state_key(other) == "step":
            step = _step_count(_read(source, name, other))
        elif tuple(own.shape) != shape:
            raise CheckpointError(
                f"{name!r}: state {other!r} of shape {tuple(own.shape)} is not elementwise, so DeepSpeed cannot "
                "partition it"
            )
        else:
            files[other] = ModelTensor(name, other, shape, own.dtype, own.dtype)
    for stem, item in files.items():
        value = {"param": empty_tensor(item), "cat_dim": 0}
        template = FileTemplate(
            folder / f"{state_key(stem)}.pt", value, {"param": item}, lambda loaded: {"param": loaded["param"]}
        )
        write_filled(source, template, record, workers=1, progress=progress, overwrite=True)
    if step is not None:
        _save(step, folder / "step.pt")


def _state_kinds(source: Source, name: str) -> Iterator[str]:
    """Yield the kinds of optimizer state that the source has of a parameter."""
    return (kind for owner, kind in source.tensors if owner == name and is_optimizer_kind(kind))


def _read(source: Source, name: str, kind: str) -> torch.Tensor:
    """Return a small tensor of the source, in full, in new CPU memory."""
    tensor = source.tensors[name, kind]
    value: torch.Tensor = read_model_tensor(
        source, ModelTensor(name, kind, tuple(tensor.shape), tensor.dtype, tensor.dtype), lambda nbytes: None
    )
    return value


def _common_step(source: Source, names: list[str]) -> Any:
    """Return the step count of the first of the parameters `names` that has one, as `_step_count` gives it; None if
    none has."""
    for name in names:
        for kind in _state_kinds(source, name):
            if state_key(kind) == "step":
                return _step_count(_read(source, name, kind))
    return None


def _step_count(value: torch.Tensor) -> Any:
    """Return a stored step count in the type that optimizers use: an int if it is stored as an integer, otherwise the
    floating-point tensor itself."""
    return value if value.is_floating_point() else int(value)


def _save(value: Any, path: Path) -> None:
    """Write a small value to `path` by `torch.save`, making its directory and replacing an existing file; it is on disk
    on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    torch.save(value, content)
    replace_durably(path, content.getvalue())


def _param_groups(source: Source, count: int) -> list[dict[str, Any]]:
    """Return the hyperparameters of each param group, from `param_groups` or a stored optimizer in the source's client
    state. If it has neither, return `count` empty dicts, which change nothing in DeepSpeed."""
    client = source.client_state if isinstance(source.client_state, dict) else {}
    for value in (client, *client.values()):
        if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
            return [_plain_options(group) for group in value["param_groups"]]
        if isinstance(value, dict) and isinstance(value.get("$optimizer"), dict):
            return [_plain_options(group["options"]) for group in value["$optimizer"]["groups"]]
    return [{} for _ in range(count)]


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters as DeepSpeed stores them: without those that say how the optimizer computes
    (`foreach`, `fused`, …), lists as tuples, and stored markers (`$tuple`, `$scalar`) replaced by their values."""
    found = {}
    for key, value in options.items():
        if key in IMPLEMENTATION:
            continue
        if isinstance(value, dict):
            found[key] = tuple(value["$tuple"]) if "$tuple" in value else value.get("$scalar", value)
        else:
            found[key] = tuple(value) if isinstance(value, list) else value
    return found


def _optimizer_state(source: Source, names: list[str]) -> dict[str, Any]:
    """Return the content of `optimizer_state.pt`: hyperparameters per group, those that all groups share, and the
    common step."""
    groups = _param_groups(source, len(names))
    common = {
        key: value for key, value in groups[0].items() if all(key in group and group[key] == value for group in groups)
    }
    step = _common_step(source, names)
    return {
        "ds_version": _WRITTEN_FOR,
        "param_groups": groups,
        # stage 3 applies one group to all, so only what they have in common is given
        "optimizer_state_dict": {
            "state": {0: {"step": torch.tensor(float(source.step)) if step is None else step}},
            "param_groups": [common],
        },
    }


def _write_model_files(
    source: Source, names: list[str], folder: Path, record: ConversionRecord, workers: int, progress: Progress
) -> None:
    """Write the model state file into `folder`, under both names that DeepSpeed's stages look for.

    It holds buffers and the parameters that are not in `names`. `workers` tensors are written at a time; what `record`
    has from an earlier run is not written again.
    """
    trained = set(names)
    members = {
        name: ModelTensor(name, kind, tuple(tensor.shape), tensor.dtype, tensor.dtype)
        for (name, kind), tensor in source.tensors.items()
        if kind == "buffer" or (kind == "param" and name not in trained)
    }
    first, second = (folder / f"{prefix}mp_rank_00_model_states.pt" for prefix in ("", "zero_pp_rank_0_"))
    template = FileTemplate(first, _model_state(source, names, members), members, lambda loaded: loaded["module"])
    write_filled(source, template, record, workers=workers, progress=progress, overwrite=True)
    second.unlink(missing_ok=True)
    if not share_file(first, second):
        shutil.copyfile(first, second)
    sync_file(second)


def _model_state(source: Source, names: list[str], members: dict[str, ModelTensor]) -> dict[str, Any]:
    """Return the content of the model state file. `members` are the tensors in it, by name, whose bytes are written
    later."""
    client = source.client_state if isinstance(source.client_state, dict) else {}
    module = OrderedDict((name, empty_tensor(member)) for name, member in members.items())
    frozen = OrderedDict((name, torch.Size(m.shape)) for name, m in members.items() if m.kind == "param")
    shapes = OrderedDict((name, torch.Size(_shape(source, name))) for name in names)
    return {
        **{str(key): value for key, value in client.items() if not _is_ours(value)},
        "lr_scheduler": _schedule_state(source, client),
        "module": module,
        "buffer_names": [name for name, kind in source.tensors if kind == "buffer"],
        "param_shapes": [shapes],
        "frozen_param_shapes": frozen,
        "frozen_param_fragments": {name: module[name] for name in frozen},
        "shared_params": dict(source.aliases),
        "optimizer": None,
        "skipped_steps": 0,
        "global_steps": source.step,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _WRITTEN_FOR,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }


def _schedule_state(source: Source, client: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the learning rate schedule: the entry `lr_scheduler` or `scheduler` of the client state
    `client`. If it has neither, the state is that of a schedule that began with training.

    DeepSpeed's schedules read `last_batch_iteration`, counted from 0, and torch's `last_epoch`, counted from 1.
    """
    for key in ("lr_scheduler", "scheduler"):
        state = client.get(key)
        if isinstance(state, dict) and state and not _is_ours(state):
            return state
    return {"last_batch_iteration": source.step - 1, "last_epoch": source.step}


def _is_ours(value: Any) -> bool:
    """Return whether a value is encoded by this package: a dict with a key that begins with `$`."""
    return isinstance(value, dict) and any(key.startswith("$") for key in value)


def _shape(source: Source, name: str) -> tuple[int, ...]:
    """Return the shape of a parameter of the source. Raises CheckpointError when it has no elements."""
    kind = "master" if (name, "master") in source.tensors else "param"
    shape = tuple(source.tensors[name, kind].shape)
    if numel(shape) == 0:
        raise CheckpointError(f"{name!r} is empty, which DeepSpeed cannot partition")
    return shape
