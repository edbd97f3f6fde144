"""The object that runs checked kernel calls: the compiled module, or a rehearsal that touches no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from . import _native

__all__ = ["kernels", "rehearsed"]


class _Kernels(Protocol):
    """The functions of `_native` that read or write memory, with its arguments."""

    def step(self, rule: int, /, *arguments: Any) -> list[tuple[float, float]] | None:
        """Run one step of the rule (`_rules.ADAM` and so on); return the squared norms of `lamb_step`, for other rules
        None.
        """

    def norm_squared(self, x: Any, n: Any, dtype: str, threads: int, /) -> float:
        """Do what `buffers.l2_norm_squared` does."""

    def norms_squared(self, x: Any, /, *arguments: Any) -> None:
        """Do what `buffers.l2_norms_squared` does."""

    def count_nonfinite(self, x: Any, n: Any, dtype: str, threads: int, /) -> int:
        """Do what `buffers.count_nonfinite` does."""

    def scale(self, x: Any, /, *arguments: Any) -> None:
        """Do what `buffers.scale` does."""

    def cast(self, x: Any, /, *arguments: Any) -> None:
        """Do what `buffers.cast` does."""

    def sum_slices(self, slices: Any, /, *arguments: Any) -> None:
        """Do what `buffers.sum_slices` does."""

    def quantize(self, x: Any, /, *arguments: Any) -> None:
        """Do what `blocks.quantize_blocks` does."""

    def dequantize(self, payload: Any, /, *arguments: Any) -> None:
        """Do what `blocks.dequantize_blocks` does."""


class _Rehearsal:
    """Kernels that touch no memory: every sum and count is 0, and outputs stay unwritten."""

    def step(self, rule: int, /, *arguments: Any) -> list[tuple[float, float]]:
        """Return one pair of zero norms for each row of coefficients, as LAMB's kernel returns norms."""
        rows = arguments[15]
        return [(0.0, 0.0)] * len(rows)

    def norm_squared(self, x: Any, n: Any, dtype: str, threads: int, /) -> float:
        return 0.0

    def count_nonfinite(self, x: Any, n: Any, dtype: str, threads: int, /) -> int:
        return 0

    def _write_nothing(self, first: Any, /, *arguments: Any) -> None: ...

    norms_squared = scale = cast = sum_slices = quantize = dequantize = _write_nothing


_KERNELS: ContextVar[_Kernels] = ContextVar("zero_optim_kernels", default=_native)


def kernels() -> _Kernels:
    """Return the kernels of this context: the compiled ones, or inside `rehearsed` those that touch no memory."""
    return _KERNELS.get()


@contextmanager
def rehearsed() -> Iterator[None]:
    """Return a context manager, inside which kernel calls touch no memory, for tensors that have none (torch's fake
    tensors).

    Python's checks of the arguments still run. Norms and counts are 0, outputs stay unwritten. A thread that is started
    inside runs the compiled kernels.
    """
    token = _KERNELS.set(_Rehearsal())
    try:
        yield
    finally:
        _KERNELS.reset(token)
