"""The object that runs checked kernel calls: the compiled module, or a dry run that touches no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from . import _native

__all__ = ["dry_run_kernels", "kernels"]


class _Kernels(Protocol):
    """The functions of `_native`, the compiled module, that read or write memory. Arguments are positional; their order
    is that of the calls in `steps.py`, `blocks.py` and `buffers.py`.
    """

    def step(self, rule: int, /, *arguments: Any) -> list[tuple[float, float]] | None:
        """Run one step of the rule (`_rules.ADAM` and so on); return the squared norms of `lamb_step`, for other rules
        None.
        """

    def norm_squared(self, x: Any, n: Any, dtype: str, threads: int, /) -> float:
        """Return the sum of squares of ``n`` elements of ``x``; see `buffers.l2_norm_squared`."""

    def norms_squared(self, x: Any, /, *arguments: Any) -> None:
        """Write the sum of squares of each block of ``x``; see `buffers.l2_norms_squared`."""

    def digests(self, x: Any, /, *arguments: Any) -> None:
        """Write a digest of each block of bytes of ``x``; see `buffers.digests`."""

    def count_nonfinite(self, x: Any, n: Any, dtype: str, threads: int, /) -> int:
        """Return how many of ``n`` elements of ``x`` are NaN or infinite; see `buffers.count_nonfinite`."""

    def scale(self, x: Any, /, *arguments: Any) -> None:
        """Multiply ``x`` by a factor in place; see `buffers.scale`."""

    def cast(self, x: Any, /, *arguments: Any) -> None:
        """Write ``x``, converted to another dtype, to an output; see `buffers.cast`."""

    def sum_slices(self, slices: Any, /, *arguments: Any) -> None:
        """Write the sum of the slices, over a divisor, to an output; see `buffers.sum_slices`."""

    def quantize(self, x: Any, /, *arguments: Any) -> None:
        """Encode ``x`` into a payload and scales; see `blocks.quantize_blocks`."""

    def dequantize(self, payload: Any, /, *arguments: Any) -> None:
        """Decode a payload and scales into an output; see `blocks.dequantize_blocks`."""


class _DryRunKernels:
    """Kernels that touch no memory: every sum and count is 0, and outputs stay unwritten."""

    def step(self, rule: int, /, *arguments: Any) -> list[tuple[float, float]]:
        """Return one pair of zero norms for each row of coefficients, as LAMB's kernel returns norms."""
        rows = arguments[15]
        return [(0.0, 0.0)] * len(rows)

    def norm_squared(self, x: Any, n: Any, dtype: str, threads: int, /) -> float:
        """Return 0 without reading memory."""
        return 0.0

    def count_nonfinite(self, x: Any, n: Any, dtype: str, threads: int, /) -> int:
        """Return 0 without reading memory."""
        return 0

    def _write_nothing(self, first: Any, /, *arguments: Any) -> None:
        """Do nothing, in place of a kernel that writes an output."""

    norms_squared = digests = scale = cast = sum_slices = quantize = dequantize = _write_nothing


_KERNELS: ContextVar[_Kernels] = ContextVar("zero_optim_kernels", default=_native)


def kernels() -> _Kernels:
    """Return the kernels of this context: the compiled ones, or inside `dry_run_kernels` those that touch no memory."""
    return _KERNELS.get()


@contextmanager
def dry_run_kernels() -> Iterator[None]:
    """Return a context manager, inside which kernel calls touch no memory, for tensors that have none (torch's fake
    tensors).

    Python's checks of the arguments still run. Norms and counts are 0, outputs stay unwritten. A thread that is started
    inside runs the compiled kernels.
    """
    token = _KERNELS.set(_DryRunKernels())
    try:
        yield
    finally:
        _KERNELS.reset(token)
