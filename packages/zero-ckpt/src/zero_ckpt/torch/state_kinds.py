"""Kinds, the names under which a checkpoint stores the values of an optimizer's state; ``history.list.0`` is the first
value in the list ``history``, and ``buffer.state`` the state ``buffer`` (see `zero_ckpt.types.state_kind`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..types import state_key, state_kind

_IN_A_LIST = re.compile(r"(.+)\.list\.(\d+)")
_SINGLE = frozenset([torch.Tensor, bool, int, float])


def by_kind(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in ``state``, one parameter's optimizer state, by kind. Each value in a list or tuple gets a
    kind of its own; None in lists and tuples is left out."""
    if _SINGLE.issuperset(map(type, state.values())):
        return {state_kind(str(key)): kept for key, kept in state.items()}
    return {state_kind(kind): value for key, kept in state.items() for kind, value in _flattened(str(key), kept)}


def with_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer state of a parameter, by key, from its values by kind: the inverse of `by_kind`, with a list
    for every list or tuple."""
    state: dict[str, Any] = {}
    lists: dict[str, dict[int, Any]] = {}
    for kind, value in values.items():
        if (found := _IN_A_LIST.fullmatch(kind)) is None:
            state[state_key(kind)] = value
        else:
            lists.setdefault(found[1], {})[int(found[2])] = value
    held = with_lists({key: [kept[number] for number in sorted(kept)] for key, kept in lists.items()}) if lists else {}
    return state | held


def unsavable(states: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Return a description of the first value in ``states`` (a parameter's name and its state) that a checkpoint cannot
    hold, neither tensor nor number; empty if there is none."""
    for name, state in states:
        for kind, value in by_kind(state).items():
            if not isinstance(value, (torch.Tensor, bool, int, float)):
                return f"'{kind}' of parameter '{name}' is a {type(value).__name__}"
    return ""


def _flattened(kind: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (kind, value) for ``value`` under ``kind``, or, if it is a list or tuple, for each value in it."""
    if isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _flattened(f"{kind}.list.{number}", one)
    elif value is not None:
        yield kind, value
