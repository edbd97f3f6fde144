"""Match the names of a model's tensors with the names in a checkpoint. Tied parameters are stored once, under the first
of their names, their stored name. ``named``, ``now``: what `named_parameters` returns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.utils import parametrize

from zero_ckpt import Checkpoint, LoadReport, MismatchError
from zero_ckpt.torch import dtype_name
from zero_partition.adapters import plain_buffers

from ..state import TrainingState
from .rank_state import is_rank_state

WEIGHT_KINDS = frozenset(["param", "master", "buffer"])
_SHOWN = 10


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's parameters by name, tied ones under each of their names."""
    return dict(module.named_parameters(remove_duplicate=False))


def aliases(named: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return, for each further name of a tied parameter, its stored name."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in named.items():
        if id(parameter) in first:
            found[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return found


def frozen_names(named: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the stored names of the parameters that require no gradient."""
    first: dict[int, str] = {}
    for name, parameter in named.items():
        if not parameter.requires_grad:
            first.setdefault(id(parameter), name)
    return list(first.values())


def tensor_shapes(state: TrainingState) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the full shapes of the model's parameters and buffers by (stored name, "param" or "buffer")."""
    ours: dict[tuple[str, str], tuple[int, ...]] = {
        (e.name, "param"): tuple(e.shape) for unit in state.partition.layout.units for e in unit.entries
    }
    ours |= {(name, "buffer"): tuple(b.shape) for name, b in state.module.named_buffers()}
    replicated = replicated_parameters(state, named_parameters(state.module))
    ours |= {(name, "param"): tuple(p.shape) for name, p in replicated.items()}
    return ours


def replicated_parameters(state: TrainingState, named: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return, by stored name, the values of parameters that no unit holds, such as those added to the model after
    `initialize`. Every rank has them in full."""
    known = {id(parameter) for unit in state.partition.units for parameter in unit.parameters}
    found = {}
    for name, parameter in named.items():
        if id(parameter) not in known:
            known.add(id(parameter))
            if type(parameter.data) is torch.Tensor:
                found[name] = parameter.data
    return found


def restructured(state: TrainingState, now: Mapping[str, nn.Parameter]) -> str:
    """Return text, for an error, on the first parameter of the engine that user code has renamed in the model, replaced
    by another object or parametrized since initialize; empty if there is none. ``now``: the model's parameters by name.
    Removed parameters do not count."""
    called = {id(parameter): name for name, parameter in now.items()}
    for unit in state.partition.units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            found = now.get(name)
            if found is parameter:
                continue
            if found is not None:
                return f"parameter '{name}' of the model is another object than the engine's"
            if id(parameter) in called:
                return f"parameter '{name}' is called '{called[id(parameter)]}' in the model now"
            if _is_computed(state.module, name):
                return f"parameter '{name}' is computed from others in the model now"
    return ""


def _is_computed(module: nn.Module, name: str) -> bool:
    """Return whether ``name``, once a parameter's, is now that of a parametrization or a plain tensor; false if its
    module is gone."""
    path, _, leaf = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return False
    return parametrize.is_parametrized(owner, leaf) or isinstance(vars(owner).get(leaf), torch.Tensor)


def check_names(state: TrainingState, checkpoint: Checkpoint) -> None:
    """Raise `MismatchError` unless the checkpoint has exactly the model's parameters and buffers, in their shapes."""
    ours = tensor_shapes(state)
    theirs = {key: tuple(entry.shape) for key, entry in checkpoint.tensors.items() if key[1] in ("param", "buffer")}
    kept = {name for name, _ in plain_buffers(state.module)}  # other libraries leave out the other buffers
    missing = [key for key in ours if key not in theirs and (key[1] == "param" or key[0] in kept)]
    problems = [f"'{n}' ({k}) of shape {ours[n, k]} is not in the checkpoint" for n, k in missing]
    problems += [f"'{n}' ({k}) is only in the checkpoint" for (n, k) in theirs if (n, k) not in ours]
    problems += [
        f"'{n}' ({k}) has shape {ours[n, k]} here and {s} in the checkpoint"
        for (n, k), s in theirs.items()
        if (n, k) in ours and ours[n, k] != s
    ]
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        raise MismatchError(
            f"{checkpoint.path} does not fit the model ({len(problems)} differences):\n  {shown}\n"
            "Pass load_module_strict=False to load what fits by name."
        )


def load_report(state: TrainingState, checkpoint: Checkpoint, *, optimizer: bool) -> LoadReport:
    """Return the report on a load by name: what becomes of each "name (kind)". ``optimizer``: states are loaded too."""
    report = LoadReport(checkpoint.path, checkpoint.step, checkpoint.report)
    ours = tensor_shapes(state)
    trained = {
        entry.name
        for unit in state.partition.units
        if unit.plan.trainable
        for entry in unit.layout.entries
        if state.optimizer is not None
    }
    left_out = set()
    for name, kind in checkpoint.tensors:
        here = f"{name} ({kind})"
        if kind in WEIGHT_KINDS:
            known = (name, "buffer" if kind == "buffer" else "param") in ours
            (report.loaded if known else report.ignored).append(here)
        elif optimizer and is_rank_state(state, name, kind):
            report.loaded.append(here)
        elif kind == "state" or not optimizer:
            left_out.add(kind)
        else:
            (report.loaded if name in trained else report.ignored).append(here)
    report.defaulted += [f"{name} ({kind})" for name, kind in ours if (name, kind) not in checkpoint.tensors]
    weights = [(entry.name, unit.plan.dtype) for unit in state.partition.units for entry in unit.layout.entries]
    report.converted += sorted(f"{name} (param)" for name, dtype in weights if _is_converted(checkpoint, name, dtype))
    report.not_requested += sorted(left_out)
    return report


def _is_converted(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> bool:
    """Return whether loading the parameter ``name`` as ``dtype`` converts it: stored are neither it nor its master in
    that dtype."""
    stored = [
        checkpoint.tensors[name, kind].dtype for kind in ("param", "master") if (name, kind) in checkpoint.tensors
    ]
    return bool(stored) and dtype_name(dtype) not in stored
