"""An optimizer's states, which user code reaches only when a save behind training has copied them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch.optim import Optimizer


class HeldStates:
    """Makes every access to ``optimizer.state`` wait until the states are copied.

    A write by ``state["exp_avg"].data`` leaves no trace on the tensor, so nothing could tell afterwards that a copy is
    torn. ``copied`` returns when states may be written. Call order: `hold` after a save has begun, `let_go` when all
    is copied; nothing is held in between steps without a save.
    """

    def __init__(self, copied: Callable[[], None]) -> None:
        self._copied = copied
        self._optimizer: Optimizer | None = None
        self._states: MutableMapping[Any, Any] | None = None

    def hold(self, optimizer: Optimizer) -> None:
        """Put a dict that waits in the place of ``optimizer.state``, where that is an attribute of its own."""
        if self._optimizer is None and "state" in vars(optimizer):
            self._optimizer, states = optimizer, optimizer.state
            optimizer.state = self._states = _WaitingDict(states, self._copied)  # type: ignore[assignment]

    def let_go(self) -> None:
        """Give the optimizer its own dict back, unless user code has given it another."""
        if self._optimizer is not None:
            if self._optimizer.state is self._states and isinstance(self._states, _WaitingDict):
                self._optimizer.state = self._states.inner
            self._optimizer = self._states = None


class _WaitingDict(MutableMapping[Any, Any]):
    """The dict ``inner``, of which every use waits first."""

    def __init__(self, inner: Any, wait: Callable[[], None]) -> None:
        self.inner, self._wait = inner, wait

    def __getitem__(self, key: Any) -> Any:
        self._wait()
        return self.inner[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._wait()
        self.inner[key] = value

    def __delitem__(self, key: Any) -> None:
        self._wait()
        del self.inner[key]

    def __iter__(self) -> Iterator[Any]:
        self._wait()
        return iter(self.inner)

    def __contains__(self, key: object) -> bool:
        return key in self.inner

    def __len__(self) -> int:
        return len(self.inner)

    def __repr__(self) -> str:
        return repr(self.inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)

    def __reduce__(self) -> Any:
        return copy.copy, (self.inner,)
