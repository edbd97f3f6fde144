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
    """A ``defaultdict(dict)`` by fragment tensor; its pickles and copies are plain ``defaultdict``s.

    ``entries``: the states at first. ``name_of``: returns the name of a parameter of the model, "" for any other
    tensor. All methods raise `PartitionError` for a key that is a parameter of the model.
    """

    def __init__(self, entries: dict[Any, Any], name_of: Callable[[nn.Parameter], str]) -> None:
        super().__init__(dict)
        self._name_of = name_of
        self._read: Callable[[], None] | None = None
        self.update(entries)

    def watch(self, read: Callable[[], None]) -> None:
        """Call ``read`` once, before user code next looks at the states, unless `unwatch` comes first. Changes this
        object's class."""
        self._read = read
        self.__class__ = WatchedFragmentStates

    def unwatch(self) -> None:
        """Stop calling the function given to `watch`, as the engine itself looks at the states now."""
        self.__class__ = FragmentStates

    def __missing__(self, key: Any) -> Any:
        """Add and return an empty state for a fragment that has none."""
        self._check(key)
        return super().__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set the state of a fragment, the value at its tensor ``key``. Raises `PartitionError` for a parameter of the
        model."""
        self._check(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        """Remove the state of a fragment; KeyError if it has none. Raises `PartitionError` for a parameter of the
        model."""
        self._check(key)
        super().__delitem__(key)

    def __contains__(self, key: object) -> bool:
        """Return whether a fragment has a state. Raises `PartitionError` for a parameter of the model."""
        self._check(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a fragment, ``default`` if it has none. Raises `PartitionError` for a parameter of the
        model."""
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove and return the state of a fragment; if it has none, return ``default`` or raise KeyError. Raises
        `PartitionError` for a parameter of the model."""
        self._check(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the state of a fragment, which becomes ``default`` if it has none. Raises `PartitionError` for a
        parameter of the model."""
        self._check(key)
        return super().setdefault(key, default)

    def update(self, *entries: Any, **named: Any) -> None:
        """Add or replace the states in the given mappings. Raises `PartitionError`, changing nothing, if a key is a
        parameter of the model."""
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
    """A `FragmentStates` between `watch` and `unwatch`: the first read of any kind, also of its length, is reported."""

    def __contains__(self, key: object) -> bool:
        """Call the function given to `watch` if it is due, and return whether a fragment has a state. Raises
        `PartitionError` for a parameter of the model."""
        self._note_read()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        """Call the function given to `watch` if it is due, and iterate over the fragment tensors that have a state."""
        self._note_read()
        return super().__iter__()

    def __len__(self) -> int:
        """Call the function given to `watch` if it is due, and return the number of fragments that have a state."""
        self._note_read()
        return super().__len__()

    def __reduce__(self) -> tuple[Any, ...]:
        """Call the function given to `watch` if it is due, and return what pickle and deepcopy write: a plain
        ``defaultdict`` of the same entries."""
        self._note_read()
        return super().__reduce__()

    def __getitem__(self, key: Any) -> Any:
        """Call the function given to `watch` if it is due, and return the state of a fragment, adding an empty one if
        it has none. Raises `PartitionError` for a parameter of the model."""
        self._note_read()
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Call the function given to `watch` if it is due, and do what `FragmentStates.get` does. Raises
        `PartitionError` for a parameter of the model."""
        self._note_read()
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Call the function given to `watch` if it is due, and do what `FragmentStates.pop` does. Raises
        `PartitionError` for a parameter of the model."""
        self._note_read()
        return super().pop(key, *default)

    def popitem(self) -> Any:
        """Call the function given to `watch` if it is due, and remove and return the last (fragment tensor, state)."""
        self._note_read()
        return super().popitem()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Call the function given to `watch` if it is due, and do what `FragmentStates.setdefault` does. Raises
        `PartitionError` for a parameter of the model."""
        self._note_read()
        return super().setdefault(key, default)

    def keys(self) -> Any:
        """Call the function given to `watch` if it is due, and return the fragment tensors that have a state."""
        self._note_read()
        return super().keys()

    def values(self) -> Any:
        """Call the function given to `watch` if it is due, and return the states."""
        self._note_read()
        return super().values()

    def items(self) -> Any:
        """Call the function given to `watch` if it is due, and return the pairs of a fragment tensor and its state."""
        self._note_read()
        return super().items()

    def copy(self) -> _Entries:  # type: ignore[override]
        """Call the function given to `watch` if it is due, and return a plain ``defaultdict`` of the same entries,
        whose states are not copied."""
        self._note_read()
        return super().copy()

    def _note_read(self) -> None:
        """Call the function given to `watch`, as code reads the states; do nothing if it was called already."""
        if self._read is not None:
            read, self._read = self._read, None
            read()


class StateElsewhere(dict[str, Any]):
    """The state of a parameter that other ranks update entirely, so that a loop over parameters runs here as there.

    Each kind that is looked up by ``[kind]`` is an empty tensor like ``tensor``, but "step" is what ``step`` returns;
    what code assigns is kept. `get`, ``in`` and iteration know only what was assigned. Pickles are plain dicts.
    """

    def __init__(self, tensor: torch.Tensor, step: Callable[[], Any]) -> None:
        super().__init__()
        self._tensor, self._step = tensor, step

    def __missing__(self, kind: str) -> Any:
        """Return the value of a kind that was not assigned: what ``step`` returns for "step", else a new empty
        tensor."""
        return self._step() if kind == "step" else torch.empty_like(self._tensor)

    def __delitem__(self, kind: str) -> None:
        """Remove a kind; do nothing if it was not assigned."""
        super().pop(kind, None)

    def pop(self, kind: str, *default: Any) -> Any:
        """Remove and return a kind; if it was not assigned, ``default`` if that is given, else a value as of a
        look-up."""
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
