"""The executor of calls whose arguments are known: the compiled kernels, or a rehearsal that touches no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from . import _native

__all__ = ["kernels", "rehearsed"]


class _Kernels(Protocol):
    """The calls that read or write memory; see `_native`."""

    def step(self, rule: int, /, *arguments: Any) -> list[tuple[float, float]] | None: ...
    def norm_squared(self, x: Any, n: Any, dtype: str, threads: int, /) -> float: ...
    def norms_squared(self, x: Any, /, *arguments: Any) -> None: ...
    def count_nonfinite(self, x: Any, n: Any, dtype: str, threads: int, /) -> int: ...
    def scale(self, x: Any, /, *arguments: Any) -> None: ...
    def cast(self, x: Any, /, *arguments: Any) -> None: ...
    def sum_slices(self, slices: Any, /, *arguments: Any) -> None: ...
    def quantize(self, x: Any, /, *arguments: Any) -> None: ...
    def dequantize(self, payload: Any, /, *arguments: Any) -> None: ...


class _Rehearsal:
    """Kernels that touch no memory: every sum is 0, every element finite."""

    def step(self, rule: int, /, *arguments: Any) -> list[tuple[float, float]]:
        rows = arguments[15]
        return [(0.0, 0.0)] * len(rows)

    def norm_squared(self, x: Any, n: Any, dtype: str, threads: int, /) -> float:
        return 0.0

    def count_nonfinite(self, x: Any, n: Any, dtype: str, threads: int, /) -> int:
        return 0

    def _nothing(self, first: Any, /, *arguments: Any) -> None: ...

    norms_squared = scale = cast = sum_slices = quantize = dequantize = _nothing


_KERNELS: ContextVar[_Kernels] = ContextVar("zero_optim_kernels", default=_native)


def kernels() -> _Kernels:
    """Return the executor of calls in this context."""
    return _KERNELS.get()


@contextmanager
def rehearsed() -> Iterator[None]:
    """Have calls in this context touch no memory: for a run over tensors that have none, such as torch's fake ones.

    What Python checks of a call is checked. Norms are 0 and counts are 0. Threads that begin inside see the kernels.
    """
    token = _KERNELS.set(_Rehearsal())
    try:
        yield
    finally:
        _KERNELS.reset(token)
