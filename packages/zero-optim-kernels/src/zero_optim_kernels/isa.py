"""The instruction set in use, and the default number of threads."""

from __future__ import annotations

from . import _native

__all__ = ["active_isa", "available_isas", "default_threads", "unavailable_isas"]


def active_isa() -> str:
    """Return the instruction set of all calls in this process: ``"avx512"``, ``"avx2"``, ``"neon"`` or ``"scalar"``.

    It is the one that the environment variable ``ZERO_ISA`` names, else the best one of this processor, and is decided
    at the first call. Raises ``ValueError`` when ``ZERO_ISA`` is unknown or cannot run here.
    """
    return _native.active_isa()


def available_isas() -> tuple[str, ...]:
    """Return the instruction sets that can run here, best first."""
    return tuple(name for name, reason in _native.targets() if not reason)


def unavailable_isas() -> dict[str, str]:
    """Return the instruction sets of this build that cannot run here, each with the reason."""
    return {name: reason for name, reason in _native.targets() if reason}


def default_threads() -> int:
    """Return the number of threads of a call with ``threads=0``, decided at the first call.

    It is ``OMP_NUM_THREADS``, else the number of processors that this process may use within its cgroup's quota.
    """
    return _native.default_threads()
