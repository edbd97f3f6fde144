"""Make user code that reads `optimizer.state` wait until a background save has copied the states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch.optim import Optimizer


class StateAccessGate:
    """Makes user code that reads ``optimizer.state`` wait until a save has copied it: a write through
    ``state["exp_avg"].data`` changes no version counter, so that a torn copy would pass. ``wait_for_copies``: returns
    when states may be written. Call order: `block` after a save has begun, `unblock` when all is copied."""

    def __init__(self, wait_for_copies: Callable[[], None]) -> None:
        self._wait_for_copies = wait_for_copies
        self._optimizer: Optimizer | None = None
        self._states: MutableMapping[Any, Any] | None = None

    def block(self, optimizer: Optimizer) -> None:
        """Replace the dict ``optimizer.state`` by one that waits, unless it is replaced already or no instance
        attribute."""
        if self._optimizer is None and "state" in vars(optimizer):
            self._optimizer, states = optimizer, optimizer.state
            optimizer.state = self._states = _WaitingDict(states, self._wait_for_copies)  # type: ignore[assignment]

    def unblock(self) -> None:
        """Restore the dict that `block` replaced, if any, unless user code has assigned another."""
        if self._optimizer is not None:
            if self._optimizer.state is self._states and isinstance(self._states, _WaitingDict):
                self._optimizer.state = self._states.inner
            self._optimizer = self._states = None


class _WaitingDict(MutableMapping[Any, Any]):
    """A mapping over the dict ``inner`` that calls ``wait`` before each access, except by ``len`` and ``in``."""

    def __init__(self, inner: Any, wait: Callable[[], None]) -> None:
        self.inner, self._wait = inner, wait

    def copy(self) -> Any:
        """Wait, then return a shallow copy of the inner dict, of its type."""
        return copy.copy(self._waited())

    __copy__ = copy

    def __getitem__(self, key: Any) -> Any:
        return self._waited()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._waited()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._waited()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._waited())

    def __contains__(self, key: object) -> bool:
        return key in self.inner

    def __len__(self) -> int:
        return len(self.inner)

    def __repr__(self) -> str:
        return repr(self._waited())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._waited(), memo)

    def __reduce__(self) -> Any:
        return copy.copy, (self._waited(),)

    def _waited(self) -> Any:
        """Wait, then return ``inner``, the real dict."""
        self._wait()
        return self.inner
