"""``optimizer.state`` where a tier keeps the states: reads bring what the tier has, writes go to it.

[Note: states on a tier] The optimizer's own dict is empty then. In its place is a mapping from fragments to mappings
from kinds to tensors. Such a tensor is a window on the tier: each torch function that gets it, or a view of it, finds
the values that are there now, and what it writes goes there. Nothing is brought before somebody asks, so a step costs
nothing. A window on what the optimizer no longer has (``state.clear()``, another state loaded) keeps its last values,
as a tensor that left a plain dict does. Memory taken by address (``data_ptr``, a storage) is a copy.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .errors import PartitionError
from .fragment_states import refuse_parameter
from .tier import StateTier
from .torch_calls import attribute_of, name_of, writes
from .updates import OwnedFragment

_STEP, _MASTER, _SCALE = "step", "master", "_scale"


class TierStates(MutableMapping[Any, Any]):
    """The states of this rank's fragments, by fragment, on ``tier``; pickles and deep copies are plain dicts.

    Iteration has the fragments that have moments; asking for another gives an empty state, as a ``defaultdict`` does.
    Other keys are kept as in a dict. ``name_of``: the name of a parameter of the model, which is refused, "" for
    anything else; ``await_readers`` returns when nobody else uses
    the tier. Nothing communicates.
    """

    def __init__(
        self,
        tier: StateTier,
        fragments: Sequence[OwnedFragment],
        name_of: Callable[[nn.Parameter], str],
        await_readers: Callable[[], None],
    ) -> None:
        self._name_of = name_of
        self._assigned: dict[str, TierState] = {}
        self._states = {owned.tensor: TierState(tier, owned, await_readers, self._assigned) for owned in fragments}
        self._by_name = {state.name: state for state in self._states.values()}
        self._others: defaultdict[Any, Any] = defaultdict(dict)

    def __getitem__(self, key: Any) -> Any:
        return self._states[key] if self._on_tier(key) else self._others[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._on_tier(key):
            self._states[key].replace(value)
        else:
            self._others[key] = value

    def __delitem__(self, key: Any) -> None:
        if not self._on_tier(key):
            del self._others[key]
        elif not self._states[key]:
            raise KeyError(key)
        else:
            self._states[key].clear()

    def __contains__(self, key: object) -> bool:
        return bool(self._states[key]) if self._on_tier(key) else key in self._others  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        yield from [tensor for tensor, state in self._states.items() if state]
        yield from self._others

    def __len__(self) -> int:
        return sum(map(bool, self._states.values())) + len(self._others)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict: ``default`` for a fragment without moments."""
        return self[key] if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        """As of a dict; what comes back is a plain dict of copies."""
        if key not in self and default:
            return default[0]
        value = self[key]
        value = value.copy() if isinstance(value, TierState) else value
        del self[key]
        return value

    def copy(self) -> defaultdict[Any, Any]:
        """The states as they are now, in plain dicts of copies."""
        return defaultdict(dict, {k: v.copy() if isinstance(v, TierState) else v for k, v in self.items()})

    __copy__ = copy

    def take_assigned(self) -> None:
        """Have the tier take what was written into tensors after they were assigned."""
        for state in self._assigned.values():
            state.take_assigned()

    def of(self, name: str) -> TierState:
        """The state of this rank's fragment of the parameter ``name``."""
        return self._by_name[name]

    def detach(self) -> None:
        """The optimizer has other states from now on: tensors of these keep their last values."""
        for state in self._states.values():
            state.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.copy(), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.copy().items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(of {len(self)} fragments)"

    def _on_tier(self, key: object) -> bool:
        if isinstance(key, nn.Parameter):
            refuse_parameter(self._name_of(key))
        return key in self._states


class TierState(MutableMapping[str, Any]):
    """One fragment's state on a tier, by kind: ``step`` and its moments (1-D); empty before its first step.

    Values that are assigned are copied to the tier, and once more where their tensor was written since, as its version
    counter tells. ``assigned``: this state is in it while it watches such tensors. Raises `PartitionError` for what the
    tier has no room for.
    """

    def __init__(
        self, tier: StateTier, owned: OwnedFragment, await_readers: Callable[[], None], assigned: dict[str, TierState]
    ) -> None:
        self._tier, self._owned, self._await_readers = tier, owned, await_readers
        self._all_assigned = assigned
        self._assigned: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._windows: weakref.WeakValueDictionary[str, _TierWindow] = weakref.WeakValueDictionary()

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self._owned.fragment.entry.name

    def __getitem__(self, kind: str) -> torch.Tensor:
        if kind not in self:
            raise KeyError(kind)
        return self._shown(kind, self.read)

    def items(self) -> ItemsView[str, Any]:
        """All kinds with their values, of one read."""
        kept = self._kept() if len(self) else {}
        return {kind: self._shown(kind, kept.__getitem__) for kind in self}.items()

    def values(self) -> ValuesView[Any]:
        """All values, of one read."""
        return dict(self.items()).values()

    def __setitem__(self, kind: str, value: Any) -> None:
        window = self._windows.get(kind)
        if window is not None and window.is_shown_by(value):  # `state[k] = state[k].to(…)` of what is there already
            return
        self.write({kind: value})
        self._windows.pop(kind, None)
        self._watch({kind: value})

    def __delitem__(self, kind: str) -> None:
        raise PartitionError(
            f"the optimizer's state '{kind}' of parameter '{self.name}' is on a tier (offload_optimizer), which keeps "
            "all kinds or none: delete the whole state, optimizer.state.pop(p), or assign zeros. Nothing was changed."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds())

    def __contains__(self, kind: object) -> bool:
        return kind in self._kinds()

    def __len__(self) -> int:
        return len(self._kinds())

    def clear(self) -> None:
        """Begin anew with the next step."""
        self.detach()
        self._await_readers()
        self._tier.restart([self.name])

    def replace(self, state: Any) -> None:
        """Have the kinds and values of the mapping ``state``, and no others; the rest begins anew."""
        given = dict(state.items()) if isinstance(state, MutableMapping) else dict(state)
        packed = self._packed(given)
        self.clear()
        if packed:
            self._tier.write({self.name: {_STEP: 1, **packed}})
        self._watch(given)

    def copy(self) -> dict[str, torch.Tensor]:
        """A plain dict of plain copies."""
        return {kind: _plain(value).clone() for kind, value in self.items()}

    __copy__ = copy

    def shown(self, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``kept``, which the tier has just given, as windows on it."""
        return {kind: self._shown(kind, kept.__getitem__) for kind in kept}

    def detach(self) -> None:
        """Tensors that were taken from here keep their last values, and those that were assigned are no longer it."""
        self._windows.clear()
        self._assigned.clear()

    def take_assigned(self) -> None:
        """Have the tier take what was written into tensors after they were assigned."""
        for kind, (reference, version) in list(self._assigned.items()):
            value = reference()
            if value is None:
                del self._assigned[kind]
            elif value._version != version:
                self._assigned[kind] = reference, value._version
                self.write({kind: value})

    def _watch(self, given: Mapping[str, Any]) -> None:
        plain = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and not isinstance(v, TierValue)}
        self._assigned |= {kind: (weakref.ref(value), value._version) for kind, value in plain.items()}
        if plain:
            self._all_assigned[self.name] = self

    def has(self, window: _TierWindow) -> bool:
        """Return whether ``window`` shows what is here."""
        return self._windows.get(window.kind) is window and window.kind in self

    def version(self) -> tuple[int, int]:
        """Another number when the tier may have other values."""
        return self._tier.writes, self._tier.held(self.name)[0]

    def read(self, kind: str) -> torch.Tensor:
        """A copy of what the tier has now."""
        return self._kept()[kind]

    def write(self, state: dict[str, Any]) -> None:
        """Put ``state`` on the tier; kinds that are not given stay."""
        packed = self._packed(state)
        self._await_readers()
        self._tier.write({self.name: packed})

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, torch.Tensor]:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def _kinds(self) -> list[str]:
        held = self._tier.held(self.name)[1]
        moments = [kind for kind in held if kind != _MASTER and not kind.endswith(_SCALE)]
        return [_STEP, *moments] if moments else []

    def _kept(self) -> dict[str, torch.Tensor]:
        self.take_assigned()
        held = self._tier.held(self.name)[1]
        if any(kind.endswith(_SCALE) for kind in held):
            raise PartitionError(
                f"the optimizer's states of parameter '{self.name}' are 8-bit codes on their tier "
                "(offload.state_dtype): optimizer.state has no values of them. Save and load them by "
                "engine.save_checkpoint and engine.load_checkpoint, or clear them: optimizer.state.clear()."
            )
        self._await_readers()
        return dict(self._tier.states([self.name]))[self.name]

    def _shown(self, kind: str, value: Callable[[str], torch.Tensor]) -> TierValue:
        window = self._windows.get(kind)
        if window is None:
            self._windows[kind] = window = _TierWindow(self, kind, value(kind))
        return window.show(window.values)

    def _packed(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` as the tier takes it; refuses what it does not."""
        kinds = {
            _STEP,
            *(kind for kind in self._tier.kinds(self.name) if kind != _MASTER and not kind.endswith(_SCALE)),
        }
        packed: dict[str, Any] = {}
        for kind, value in state.items():
            numel = 1 if kind == _STEP else self._owned.fragment.length
            fits = value.numel() == numel if isinstance(value, torch.Tensor) else kind == _STEP
            if kind not in kinds or not fits:
                raise PartitionError(
                    f"optimizer.state of parameter '{self.name}': a tier keeps {sorted(kinds)} of it "
                    f"(offload_optimizer), as tensors of {self._owned.fragment.length} elements, got '{kind}': "
                    f"{_described(value)}. Nothing was changed."
                )
            packed[kind] = int(value) if kind == _STEP else _plain(value).detach().flatten().cpu()
        return packed


class _TierWindow:
    """Memory that shows one value of a `TierState`."""

    def __init__(self, state: TierState, kind: str, values: torch.Tensor) -> None:
        self.state, self.kind, self.values = state, kind, values
        self._version = state.version()

    def show(self, alias: torch.Tensor) -> TierValue:
        """``alias`` of this window's memory, as user code gets it."""
        shown = alias.as_subclass(TierValue)
        shown.window = self
        return shown

    def is_shown_by(self, value: Any) -> bool:
        """Return whether ``value`` is all of this window."""
        return isinstance(value, TierValue) and value.window is self and _plain(value).is_set_to(self.values)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in this window's memory."""
        return tensor.untyped_storage().data_ptr() == self.values.untyped_storage().data_ptr()

    def refresh(self) -> None:
        """Have the values of the tier, where they are others by now."""
        self.state.take_assigned()
        if self._version != self.state.version() and self.state.has(self):
            self.values.copy_(self.state.read(self.kind))
            self._version = self.state.version()

    def write_back(self) -> None:
        """Have the tier take these values."""
        if self.state.has(self):
            self.state.write({self.kind: self.values})
            self._version = self.state.version()


def _call(
    _class: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    keywords, call = kwargs or {}, name_of(func)
    windows = list({v.window: None for v in tree_leaves((args, keywords)) if isinstance(v, TierValue)})
    if call in ("set_", "resize_") or (call == "__set__" and attribute_of(func) == "data"):
        raise PartitionError(
            f"the optimizer's state '{windows[0].kind}' of parameter '{windows[0].state.name}' is on a tier "
            "(offload_optimizer): its memory cannot be exchanged. Copy values, or assign optimizer.state[p][kind]."
        )
    for window in windows:
        window.refresh()
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **keywords)
        if call == "numpy":
            result.flags.writeable = False
    if writes(call) or keywords.get("out") is not None:
        for window in windows:
            window.write_back()

    def shown(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, TierValue):
            return tensor
        with torch._C.DisableTorchFunctionSubclass():
            return next((window.show(tensor) for window in windows if window.has(tensor)), tensor)

    return tree_map_only(torch.Tensor, shown, result)


class TierValue(torch.Tensor):
    """A value of a `TierState`, or a view of one; see [Note: states on a tier]."""

    window: _TierWindow
    __torch_function__: ClassVar[Any] = classmethod(_call)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        self.window.refresh()
        return _plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.window.refresh()
        return _plain(self).clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _plain(value: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor) if isinstance(value, TierValue) else value


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
