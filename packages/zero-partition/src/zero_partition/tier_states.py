"""``optimizer.state`` for states that a tier keeps: reading loads them from the tier, writing stores them there.

[Note: states on a tier] The optimizer's own dict is empty then. It is replaced by a mapping from fragments to mappings
from kinds to tensors. Such a tensor is a window on the tier: a torch function that gets it, or a view of it, reads the
tier's present values, and writes go to the tier. Nothing is loaded before code asks for it, so a step costs nothing. A
window on a state that the optimizer no longer has (``state.clear()``, another state loaded) keeps its last values, like
a tensor that was removed from a plain dict. Memory taken by address (``data_ptr``, a storage) is a copy.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from .errors import PartitionError
from .fragment_states import StateElsewhere, refuse_parameter
from .guarded_tensors import REFERENCE
from .tier import StateTier
from .tier_state import TierState
from .updates import OwnedFragment


class TierStates(MutableMapping[Any, Any]):
    """Maps the optimizer's tensors to the states of this rank's fragments on ``tier``; copies are plain dicts.

    Iteration yields the tensors whose fragments have moments; looking up another one gives an empty state, as in a
    ``defaultdict``. A parameter that only other ranks update has a `StateElsewhere`. Keys other than tensors are kept
    as in a dict. Nothing communicates.

    ``fragments``: by tensor, in the order of the param groups, this rank's fragment of each trained parameter, None for
    none. ``name_of``: returns the name of a parameter of the model, which is refused as a key, "" for anything else.
    ``await_readers``: waits until nothing else reads the tier. ``tell``: publishes why this rank fails, for ranks that
    wait for it.
    """

    def __init__(
        self,
        tier: StateTier,
        fragments: Mapping[nn.Parameter, OwnedFragment | None],
        name_of: Callable[[nn.Parameter], str],
        await_readers: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self._name_of = name_of
        self._assigned: dict[str, TierState] = {}
        self._states: dict[nn.Parameter, TierState | StateElsewhere] = {
            tensor: StateElsewhere(tensor, self._step_of_any)
            if owned is None
            else TierState(tier, owned, await_readers, tell, self._assigned)
            for tensor, owned in fragments.items()
        }
        self._by_name = {state.name: state for state in self._states.values() if isinstance(state, TierState)}
        self._deleted: set[Any] = set()  # since the last step; what other ranks have is not known here
        self._others: defaultdict[Any, Any] = defaultdict(dict)

    def __getitem__(self, key: Any) -> Any:
        """Return the state of a tensor of the param groups, or the value that was stored under any other key."""
        return self._states[key] if self._on_tier(key) else self._others[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Replace the state of a tensor of the param groups by a copy of the mapping ``value``; store any other key as
        a dict does.

        Does nothing for a parameter that other ranks update. Raises `PartitionError` if ``value`` is another tensor's
        state itself.
        """
        if self._on_tier(key):
            state = self._states[key]
            if isinstance(value, (TierState, StateElsewhere)) and value is not state:
                name = key.__dict__[REFERENCE].name
                raise PartitionError(
                    f"optimizer.state of parameter '{name}' was set to the state of another one, which is on a tier "
                    "(offload_optimizer) where each has its own: set a copy, optimizer.state[p].copy(). Nothing was "
                    "changed."
                )
            if isinstance(state, TierState):
                state.replace(value)
        else:
            self._others[key] = value

    def __delitem__(self, key: Any) -> None:
        """Drop the moments and step count of a tensor of the param groups, or the value at any other key. Raises
        KeyError if there are none."""
        if not self._on_tier(key):
            del self._others[key]
        elif key not in self:
            raise KeyError(key)
        else:
            self._states[key].clear()
            self._deleted.add(key)

    def __contains__(self, key: object) -> bool:
        """Return whether the key has a state: a tensor whose fragment has moments; a tensor that only other ranks
        update, if any fragment here has moments; any other key that was stored."""
        if not self._on_tier(key):
            return key in self._others
        state = self._states[key]  # type: ignore[index]
        if isinstance(state, TierState):
            return bool(state)
        return key not in self._deleted and (bool(self._deleted) or any(self._by_name.values()))

    def __iter__(self) -> Iterator[Any]:
        """Yield the tensors that have a state, in the order of the param groups, then the other keys that were
        stored."""
        yield from [tensor for tensor in self._states if tensor in self]
        yield from self._others

    def __len__(self) -> int:
        """Return the number of keys that iteration yields."""
        return sum(1 for _ in self)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state at ``key``; ``default`` if it has none, as a fragment without moments."""
        return self[key] if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove the state at ``key`` and return it as a plain dict of copies; ``default`` where there is none. Raises
        KeyError if that is not given."""
        if key not in self and default:
            return default[0]
        value = self[key]
        value = value.copy() if isinstance(value, TierState) else value
        del self[key]
        return value

    def copy(self) -> defaultdict[Any, Any]:
        """Return a plain ``defaultdict`` of the present states as plain dicts of copies, read from the tier."""
        return defaultdict(dict, {k: v.copy() if isinstance(v, TierState) else v for k, v in self.items()})

    __copy__ = copy

    def _step_of_any(self) -> Any:
        """Return a copy of ``step`` (0-D tensor) of the first state on this rank that has one; 0 if none has."""
        counted = (state["step"] for state in self._by_name.values() if "step" in state)
        return copy.deepcopy(next(counted, torch.zeros(())))

    def store_assigned(self) -> None:
        """Copy to the tier again each tensor that user code has assigned to a state and written since; forget which
        states it has deleted. Called before each step."""
        self._deleted.clear()
        for state in self._assigned.values():
            state.store_assigned()

    def state_of(self, name: str) -> TierState:
        """Return the state of this rank's fragment of the parameter ``name``."""
        return self._by_name[name]

    def detach(self) -> None:
        """Disconnect all tensors that code has taken from these states from the tier, as the optimizer has other states
        now."""
        for state in self._by_name.values():
            state.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a deep copy as plain dicts."""
        return copy.deepcopy(self.copy(), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle writes: a plain ``defaultdict`` of copies, read from the tier."""
        return defaultdict, (dict,), None, None, iter(self.copy().items())

    def __repr__(self) -> str:
        """Return the number of states as text, without a read of the tier."""
        return f"{type(self).__name__}(of {len(self)} fragments)"

    def _on_tier(self, key: object) -> bool:
        """Return whether ``key`` is a tensor of the param groups, so that its state is on the tier.

        Raises `PartitionError` for a parameter of the model.
        """
        if isinstance(key, nn.Parameter):
            refuse_parameter(self._name_of(key))
        return key in self._states
