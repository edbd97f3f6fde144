"""The instruction set that runs, and the number of threads."""

from __future__ import annotations

from . import _native

__all__ = ["active_isa", "available_isas", "default_threads", "unavailable_isas"]


def active_isa() -> str:
    """The instruction set of every call in this process: ``"avx512"``, ``"avx2"``, ``"neon"`` or ``"scalar"``.

    It is the best one this processor has, or the one that the environment variable ``ZERO_ISA`` names, and is decided
    at the first call. Raises ``ValueError`` when ``ZERO_ISA`` names one that is unknown or cannot run here.
    """
    return _native.active_isa()


def available_isas() -> tuple[str, ...]:
    """The instruction sets that can run here, best first."""
    return tuple(name for name, reason in _native.targets() if not reason)


def unavailable_isas() -> dict[str, str]:
    """The instruction sets of this build that cannot run here, each with the reason."""
    return {name: reason for name, reason in _native.targets() if reason}


def default_threads() -> int:
    """Threads of a call with ``threads=0``: ``OMP_NUM_THREADS``, else the processors of this process within its
    cgroup's quota.

    Decided at the first call.
    """
    return _native.default_threads()
