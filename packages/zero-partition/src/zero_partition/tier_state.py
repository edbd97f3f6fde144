"""The state of one fragment on a tier, as a mapping from kinds ("step", "exp_avg", …) to tensors; see [Note: states on
a tier] in tier_states.py. A window is host memory that mirrors one value on the tier (tier_values.py)."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from .errors import PartitionError
from .guarded_tensors import REFERENCE, FragmentReference, check_same_parameter, plain
from .tier import StateTier
from .tier_values import TierValue, TierWindow, plain_value
from .updates import OwnedFragment

_STEP, _MASTER, _SCALE = "step", "master", "_scale"
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _publishes_refusal(method: _Method) -> _Method:
    """Decorate a method of `TierState`: a `PartitionError` that it raises is also told to the other ranks by ``tell``,
    as they may have no fragment of the parameter and so no error of their own."""

    @functools.wraps(method)
    def wrapped(self: TierState, *args: Any) -> Any:
        """Call the method and return its result; tell other ranks of a `PartitionError` before it is raised."""
        try:
            return method(self, *args)
        except PartitionError as refusal:
            self.tell(f"failed: {type(refusal).__name__}: {refusal}")
            raise

    return wrapped  # type: ignore[return-value]


class TierState(MutableMapping[str, Any]):
    """Maps kinds to the values of one fragment's state on a tier: ``step`` and its moments, in the fragment's shape;
    empty before its first step.

    Reading gives a `TierValue`, whose memory is a window: writes to it reach the tier. Assigning copies the value to
    the tier. A plain tensor that was assigned is watched by a weak reference: `store_assigned`, which each read calls,
    copies it again if its version counter has changed. Values are read and written once nothing else reads the tier
    (``await_readers``).

    Raises `PartitionError`, also told to other ranks by ``tell``, for values that the tier cannot keep, for deleting a
    kind, and for reading 8-bit moments; KeyError for a kind that the state does not have.

    ``tier``: keeps the values. ``owned``: the fragment. ``await_readers``, ``tell``: as in `TierStates`. ``assigned``:
    a dict that the states of one tier share, by parameter name those with watched tensors; this one adds itself.
    """

    def __init__(
        self,
        tier: StateTier,
        owned: OwnedFragment,
        await_readers: Callable[[], None],
        tell: Callable[[str], None],
        assigned: dict[str, TierState],
    ) -> None:
        self._tier, self._owned, self._await_readers, self.tell = tier, owned, await_readers, tell
        self._all_assigned = assigned
        self._assigned: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._step_given = False
        self._windows: weakref.WeakValueDictionary[str, TierWindow] = weakref.WeakValueDictionary()

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self._owned.fragment.entry.name

    @property
    def reference(self) -> FragmentReference | None:
        """The guard's reference (the parameter's name and full shape) for tensors of this state; None if nothing guards
        them."""
        found = self._owned.tensor.__dict__.get(REFERENCE)
        return None if found is None else dataclasses.replace(found, is_updated=False)

    def __getitem__(self, kind: str) -> torch.Tensor:
        """Return the value of ``kind``, in a window on the tier. Raises KeyError for a kind that the state does not
        have."""
        if kind not in self:
            raise KeyError(kind)
        return self._shown(kind, self.read)

    def items(self) -> ItemsView[str, Any]:
        """Return the pairs (kind, value in a window on the tier), all from one read of the tier."""
        kept = self._read_all() if len(self) else {}
        return {kind: self._shown(kind, kept.__getitem__) for kind in self}.items()

    def values(self) -> ValuesView[Any]:
        """Return all values, in windows on the tier, from one read of the tier."""
        return dict(self.items()).values()

    def __setitem__(self, kind: str, value: Any) -> None:
        """Copy ``value`` to the tier as the new value of ``kind``; windows on the former value are disconnected and
        keep it.

        Does nothing if ``value`` is the present window's own tensor. The first value also gives the state a ``step`` of
        1.
        """
        window = self._windows.get(kind)
        if window is not None and window.is_shown_by(value):  # `state[k] = state[k].to(…)` of what is there already
            return
        self._step_given |= kind == _STEP
        is_first = not self._step_given and not self._tier.held(self.name)[0]
        counted = {_STEP: 1} if is_first else {}  # torch's SGD has moments and counts no steps
        self.write({**counted, kind: value})
        self._windows.pop(kind, None)
        self._watch({kind: value})

    @_publishes_refusal
    def __delitem__(self, kind: str) -> None:
        """Raise `PartitionError`, as a tier keeps all kinds or none."""
        raise PartitionError(
            f"the optimizer's state '{kind}' of parameter '{self.name}' is on a tier (offload_optimizer), which keeps "
            "all kinds or none: delete the whole state, optimizer.state.pop(p), or assign zeros. Nothing was changed."
        )

    def __iter__(self) -> Iterator[str]:
        """Yield ``step`` and the kinds of moments; nothing before the fragment's first step."""
        return iter(self._kinds())

    def __contains__(self, kind: object) -> bool:
        """Return whether the tier has a value of ``kind``; False for masters and for scales of 8-bit moments."""
        return kind in self._kinds()

    def __len__(self) -> int:
        """Return the number of kinds, ``step`` included; 0 before the fragment's first step."""
        return len(self._kinds())

    def clear(self) -> None:
        """Drop the moments and the step count, once nothing reads the tier. Tensors that code has taken from this state
        keep their last values."""
        self._step_given = False
        self.detach()
        self._await_readers()
        self._tier.restart([self.name])

    def replace(self, state: Any) -> None:
        """Replace the whole state by the kinds and values of the mapping ``state``; kinds not in it are dropped, but a
        missing ``step`` becomes 1. An empty mapping leaves the state empty. Raises `PartitionError`, changing nothing,
        for values that the tier cannot keep."""
        given = dict(state.items()) if isinstance(state, MutableMapping) else dict(state)
        packed = self._packed(given)
        self.clear()
        self._step_given = _STEP in packed
        if packed:
            self._tier.write({self.name: {_STEP: 1, **packed}})
        self._watch(given)

    def copy(self) -> dict[str, torch.Tensor]:
        """Return a plain dict of plain copies of the values, by kind."""
        return {kind: plain_value(value).clone() for kind, value in self.items()}

    __copy__ = copy

    def shown(self, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by kind the values ``kept``, which were just read from the tier, as `TierValue`s whose uses are not
        guarded."""
        return {kind: self._shown(kind, kept.__getitem__, is_guarded=False) for kind in kept}

    def detach(self) -> None:
        """Disconnect tensors that code has taken from this state, which keep their last values, and stop watching
        assigned ones. The tier's values stay."""
        self._windows.clear()
        self._assigned.clear()

    def store_assigned(self) -> None:
        """Copy to the tier again each assigned tensor that was written since; forget those that no longer exist."""
        for kind, (reference, version) in list(self._assigned.items()):
            value = reference()
            if value is None:
                del self._assigned[kind]
            elif value._version != version:
                self._assigned[kind] = reference, value._version
                self.write({kind: value})

    def _watch(self, given: Mapping[str, Any]) -> None:
        """Watch the plain tensors among the values ``given`` (by kind): `store_assigned` copies them again when they
        are written."""
        plain = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and not isinstance(v, TierValue)}
        self._assigned |= {kind: (weakref.ref(value), value._version) for kind, value in plain.items()}
        if plain:
            self._all_assigned[self.name] = self

    def is_current_window(self, window: TierWindow) -> bool:
        """Return whether ``window`` is still this state's window on its kind: False once that kind was assigned again
        or cleared. Its memory may be out of date even then; see `version`."""
        return self._windows.get(window.kind) is window and window.kind in self

    def version(self) -> tuple[int, int]:
        """Return (writes to the tier, steps of the fragment): a pair that differs from an earlier one if the tier may
        have other values since."""
        return self._tier.writes, self._tier.held(self.name)[0]

    def read(self, kind: str) -> torch.Tensor:
        """Return a copy of the tier's present value of ``kind``: 1-D, or 0-D for a number such as ``step``."""
        return self._read_all()[kind]

    def write(self, state: dict[str, Any]) -> None:
        """Write the values in ``state`` (by kind) to the tier, once nothing reads it; other kinds stay. Raises
        `PartitionError`, writing nothing, for a kind or size that the tier does not keep and for another parameter's
        state."""
        packed = self._packed(state)
        self._await_readers()
        self._tier.write({self.name: packed})

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, torch.Tensor]:
        """Return a plain dict of plain copies of the values, as `copy` does."""
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle writes: a plain dict of copies of the values."""
        return dict, (self.copy(),)

    def __repr__(self) -> str:
        """Return the text of a dict with the present values; reads the tier."""
        return repr(dict(self.items()))

    def _kinds(self) -> list[str]:
        """Return the names of the kinds that user code sees: ``step``, other numbers, moments; none before the
        fragment's first step."""
        held = self._tier.held(self.name)[1]
        moments = [kind for kind in held if kind != _MASTER and not kind.endswith(_SCALE)]
        return [_STEP, *self._tier.numbers(self.name), *moments] if moments else []

    @_publishes_refusal
    def _read_all(self) -> dict[str, torch.Tensor]:
        """Return copies of all values on the tier, by kind, after `store_assigned` and a wait for other readers of the
        tier. Raises `PartitionError` for 8-bit moments."""
        self.store_assigned()
        held = self._tier.held(self.name)[1]
        if any(kind.endswith(_SCALE) for kind in held):
            raise PartitionError(
                f"the optimizer's states of parameter '{self.name}' are 8-bit codes on their tier "
                "(offload.state_dtype): optimizer.state has no values of them. Save and load them by "
                "engine.save_checkpoint and engine.load_checkpoint, or clear them: optimizer.state.clear()."
            )
        self._await_readers()
        return dict(self._tier.states([self.name]))[self.name]

    def _shown(self, kind: str, value: Callable[[str], torch.Tensor], *, is_guarded: bool = True) -> TierValue:
        """Return the value of ``kind`` for user code, in its window on the tier. ``value``: reads the value of a kind,
        which makes a new window if there is none.

        ``is_guarded``: the guard checks uses of it; never those of ``step``.
        """
        window = self._windows.get(kind)
        if window is None:
            self._windows[kind] = window = TierWindow(self, kind, self._in_shape(kind, value(kind)))
        return window.show(window.values, is_guarded=is_guarded and kind != _STEP)

    def _in_shape(self, kind: str, value: torch.Tensor) -> torch.Tensor:
        """Return a value read from the tier (1-D) in the fragment's shape; a number (0-D) as it is."""
        return value if value.dim() == 0 else value.view(self._owned.shape)

    @_publishes_refusal
    def _packed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the values of ``state`` (by kind) in the tier's format: 1-D tensors on the host, and ``step`` as an
        int.

        Raises `PartitionError` for a kind or size that the tier does not keep and for another parameter's state.
        """
        numbers = {_STEP, *self._tier.numbers(self.name)}
        kinds = {
            *numbers,
            *(kind for kind in self._tier.kinds(self.name) if kind != _MASTER and not kind.endswith(_SCALE)),
        }
        packed: dict[str, Any] = {}
        for kind, value in state.items():
            self._check_own(kind, value)
        for kind, value in tree_map(plain, state).items():
            numel = 1 if kind in numbers else self._owned.fragment.length
            fits = value.numel() == numel if isinstance(value, torch.Tensor) else kind in numbers
            if kind not in kinds or not fits:
                raise PartitionError(
                    f"optimizer.state of parameter '{self.name}': a tier keeps {sorted(kinds)} of it "
                    f"(offload_optimizer), as tensors of {self._owned.fragment.length} elements, got '{kind}': "
                    f"{_describe_value(value)}. Nothing was changed."
                )
            packed[kind] = int(value) if kind == _STEP else torch.as_tensor(value).detach().flatten().cpu()
        return packed

    def _check_own(self, kind: str, value: Any) -> None:
        """Raise `PartitionError` if ``value``, given for ``kind``, belongs to another state or kind: it is a window's
        tensor, or a view of it, or was computed from another parameter's tensor."""
        window = value.window if isinstance(value, TierValue) else None
        if window is not None and (window.state is not self or window.kind != kind):
            raise PartitionError(
                f"optimizer.state of parameter '{self.name}': '{kind}' was set to the state '{window.kind}' of "
                f"parameter '{window.state.name}', which is on a tier (offload_optimizer) where each has memory of its "
                "own: set a copy, value.clone(). Nothing was changed."
            )
        check_same_parameter(self.name, kind, value)


def _describe_value(value: object) -> str:
    """Return words for error messages that describe a value: a tensor's shape, or the repr of anything else."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
