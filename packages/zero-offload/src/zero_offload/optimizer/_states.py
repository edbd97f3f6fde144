"""State dicts: plain tensors, in the shape of torch.optim's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from ._entries import Entry, Fragment
from ._rules import Rule
from ._tiers import Tier
from ._update import prepare

__all__ = ["check_states", "read_states", "write_states"]

Groups = Sequence[Mapping[str, Any]]
States = dict[Entry, dict[str, torch.Tensor]]
_MASTER = "master"


def read_states(slices: Sequence[tuple[Fragment, ...]], tier: Tier) -> States:
    """Each stepped entry's step number and tensors, copied to host memory and shaped like the parameter.

    A master is part of it where it holds more digits than the parameter.
    """
    states: States = {}
    stepped = [i for i, slice_ in enumerate(slices) if any(f.entry.step for f in slice_) and not tier.is_fresh(i)]
    for entry in {fragment.entry: None for slice_ in slices for fragment in slice_}:
        if entry.step:
            shape = entry.param.shape
            states[entry] = {"step": torch.tensor(float(entry.step))}
            for kind in entry.kinds:
                if kind != _MASTER or entry.param.dtype != entry.dtype:
                    states[entry][kind] = torch.empty(shape, dtype=entry.dtype)
    with closing(tier.visit(stepped, dirty=False)) as visits:  # type: ignore[type-var]
        for visit in visits:
            for fragment, tensors in zip(slices[visit.number], visit.tensors, strict=True):
                for kind, target in states.get(fragment.entry, {}).items():
                    if kind in tensors:
                        fragment.of(target).copy_(tensors[kind])
    return states


def check_states(states: Mapping[Entry, Mapping[str, Any]]) -> None:
    """ValueError, naming the parameter, for a state that does not fit it."""
    for entry, state in states.items():
        for kind in entry.kinds:
            value = state.get(kind)
            if value is None and kind != _MASTER:
                raise ValueError(f"'{entry.name}': the saved state has no '{kind}', only {', '.join(sorted(state))}")
            if value is not None and value.shape != entry.param.shape:
                raise ValueError(
                    f"'{entry.name}': saved '{kind}' has shape {tuple(value.shape)}, "
                    f"the parameter has {tuple(entry.param.shape)}"
                )


def write_states(
    rule: Rule,
    groups: Groups,
    slices: Sequence[tuple[Fragment, ...]],
    tier: Tier,
    states: Mapping[Entry, Mapping[str, Any]],
) -> None:
    """Replace everything on the tier; entries that are not in ``states`` begin anew."""
    tier.reset()
    for entry in {fragment.entry: None for slice_ in slices for fragment in slice_}:
        state = states.get(entry)
        # SGD's state in torch has no step number; with a momentum buffer it is past the first.
        entry.step = 0 if state is None else int(state.get("step", 1))
        # The next step compares the masters with the weights that are there then.
        entry.version = None
    stepped = [i for i, slice_ in enumerate(slices) if any(f.entry in states for f in slice_)]
    with closing(tier.visit(stepped, dirty=True)) as visits:  # type: ignore[type-var]
        for visit in visits:
            prepare(rule, groups, slices[visit.number], visit)
            for fragment, tensors in zip(slices[visit.number], visit.tensors, strict=True):
                saved = states.get(fragment.entry, {})
                for kind, tensor in tensors.items():
                    if saved.get(kind) is not None:
                        tensor.copy_(fragment.of(saved[kind].detach().contiguous()))
    tier.flush()
