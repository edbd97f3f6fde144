"""The optimizer's ``state`` by fragment, which refuses look-ups by the model's parameters.

An entry for a parameter of the model would be read as absent, or be kept and never used. Outside the optimizer's step
the first look at the states is reported, which are guarded from then on (optimizer_tensors.py). Where a tier keeps the
states, ``state`` is a mapping that reads and writes there (tier_states.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .errors import PartitionError

_Entries = defaultdict[Any, Any]


class FragmentStates(_Entries):
    """A ``defaultdict(dict)``: the state of each fragment (a dict) by the fragment's tensor; its pickles and copies are
    plain ``defaultdict``s.

    ``entries``: the states at first. ``name_of``: returns the name of a parameter of the model, "" for any other
    tensor. All methods raise `PartitionError` for a key that is a parameter of the model.
    """

    def __init__(self, entries: dict[Any, Any], name_of: Callable[[nn.Parameter], str]) -> None:
        super().__init__(dict)
        self._name_of = name_of
        self._read: Callable[[], None] | None = None
        self.update(entries)

    def watch(self, read: Callable[[], None]) -> None:
        """Have ``read`` called once, before user code next looks at the states, unless `unwatch` comes first. Changes
        this object's class to `WatchedFragmentStates`."""
        self._read = read
        self.__class__ = WatchedFragmentStates

    def unwatch(self) -> None:
        """Undo `watch`, as the engine itself looks at the states now: ``read`` is not called until another `watch`."""
        self.__class__ = FragmentStates

    def __missing__(self, key: Any) -> Any:
        """Add and return an empty state for the fragment ``key``, which has none. Raises `PartitionError` for a
        parameter of the model."""
        self._check(key)
        return super().__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set the state of the fragment ``key`` to ``value``. Raises `PartitionError` for a parameter of the model."""
        self._check(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        """Remove the state of the fragment ``key``. Raises KeyError if it has none, and `PartitionError` for a
        parameter of the model."""
        self._check(key)
        super().__delitem__(key)

    def __contains__(self, key: object) -> bool:
        """Return whether the fragment ``key`` has a state. Raises `PartitionError` for a parameter of the model."""
        self._check(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of the fragment ``key``; ``default`` if it has none. Raises `PartitionError` for a parameter
        of the model."""
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove and return the state of the fragment ``key``. If it has none, return ``default``, or raise KeyError
        without one. Raises `PartitionError` for a parameter of the model."""
        self._check(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the state of the fragment ``key``; if it has none, set it to ``default`` first. Raises
        `PartitionError` for a parameter of the model."""
        self._check(key)
        return super().setdefault(key, default)

    def update(self, *entries: Any, **named: Any) -> None:
        """Add or replace the states in ``entries``, mappings by fragment (or what ``dict()`` takes). Raises
        `PartitionError`, changing nothing, if a key is a parameter of the model."""
        given = dict(*entries, **named)
        for key in given:
            self._check(key)
        super().update(given)

    def __ior__(self, entries: Any) -> FragmentStates:  # type: ignore[misc]
        """Update this object by ``entries``, as `update` does."""
        self.update(entries)
        return self

    def copy(self) -> _Entries:  # type: ignore[override]
        """Return a plain ``defaultdict`` of the same entries, whose states are not copied."""
        return defaultdict(dict, dict.items(self))

    def __copy__(self) -> Any:
        """Return what `copy` returns."""
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle and deepcopy write: a plain ``defaultdict`` of the same entries."""
        return defaultdict, (dict,), None, None, iter(dict.items(self))

    def _check(self, key: object) -> None:
        """Raise `PartitionError` if ``key`` is a parameter of the model; other keys pass."""
        if isinstance(key, nn.Parameter):
            refuse_parameter(self._name_of(key))


class WatchedFragmentStates(FragmentStates):
    """A `FragmentStates` between `watch` and `unwatch`: before the first read of any kind, also of its length, it
    reports the read, that is, it calls the function that was given to `watch`. Every method then does what that of
    `FragmentStates` does, and raises as that does."""

    def __contains__(self, key: object) -> bool:
        """Report the read if it is the first, and return whether the fragment ``key`` has a state."""
        self._note_read()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        """Report the read if it is the first, and iterate over the fragment tensors that have a state."""
        self._note_read()
        return super().__iter__()

    def __len__(self) -> int:
        """Report the read if it is the first, and return the number of fragments that have a state."""
        self._note_read()
        return super().__len__()

    def __reduce__(self) -> tuple[Any, ...]:
        """Report the read if it is the first, and return what pickle and deepcopy write: a plain ``defaultdict`` of the
        same entries."""
        self._note_read()
        return super().__reduce__()

    def __getitem__(self, key: Any) -> Any:
        """Report the read if it is the first, and return the state of the fragment ``key``, adding an empty one if it
        has none."""
        self._note_read()
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Report the read if it is the first, and return the state of the fragment ``key``; ``default`` if it has
        none."""
        self._note_read()
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Report the read if it is the first, and remove and return the state of the fragment ``key``; ``default``, or
        KeyError without one, if it has none."""
        self._note_read()
        return super().pop(key, *default)

    def popitem(self) -> Any:
        """Report the read if it is the first, and remove and return the last (fragment tensor, state). Raises KeyError
        if there is none."""
        self._note_read()
        return super().popitem()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Report the read if it is the first, and return the state of the fragment ``key``, which becomes ``default``
        if it has none."""
        self._note_read()
        return super().setdefault(key, default)

    def keys(self) -> Any:
        """Report the read if it is the first, and return the fragment tensors that have a state."""
        self._note_read()
        return super().keys()

    def values(self) -> Any:
        """Report the read if it is the first, and return the states."""
        self._note_read()
        return super().values()

    def items(self) -> Any:
        """Report the read if it is the first, and return the pairs (fragment tensor, state)."""
        self._note_read()
        return super().items()

    def copy(self) -> _Entries:  # type: ignore[override]
        """Report the read if it is the first, and return a plain ``defaultdict`` of the same entries, whose states are
        not copied."""
        self._note_read()
        return super().copy()

    def _note_read(self) -> None:
        """Call the function that was given to `watch`, as code reads the states; do nothing if it was called before."""
        if self._read is not None:
            read, self._read = self._read, None
            read()


class StateElsewhere(dict[str, Any]):
    """The state of a parameter that other ranks update entirely, so that a loop over parameters runs here as there.

    A key is a kind of state, as "exp_avg". Each kind that is looked up by ``[kind]`` is an empty tensor like
    ``tensor``, but "step" is what ``step`` returns; what code assigns is kept. `get`, ``in`` and iteration know only
    what was assigned. Pickles are plain dicts.
    """

    def __init__(self, tensor: torch.Tensor, step: Callable[[], Any]) -> None:
        super().__init__()
        self._tensor, self._step = tensor, step

    def __missing__(self, kind: str) -> Any:
        """Return the value of a kind that was not assigned: what ``step`` returns for "step", else a new empty
        tensor."""
        return self._step() if kind == "step" else torch.empty_like(self._tensor)

    def __delitem__(self, kind: str) -> None:
        """Remove the assigned value of ``kind``; do nothing if there is none."""
        super().pop(kind, None)

    def pop(self, kind: str, *default: Any) -> Any:
        """Remove and return the assigned value of ``kind``. If there is none, return ``default`` if it is given, else
        what ``[kind]`` would return."""
        value = default[0] if default else self[kind]
        return super().pop(kind, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle writes: a plain dict of what code has assigned."""
        return dict, (), None, None, iter(self.items())


def refuse_parameter(name: str) -> None:
    """Raise `PartitionError` for a look-up in the optimizer's states by the model's parameter ``name``; do nothing if
    ``name`` is empty."""
    if name:
        raise PartitionError(
            f"optimizer.state was asked for parameter '{name}': it has the states of this rank's fragments, by the "
            "tensors in optimizer.param_groups. Read engine.full_state(p, 'exp_avg'), write engine.set_full_state; "
            "change all states alike through optimizer.state.values(). Nothing was changed."
        )
