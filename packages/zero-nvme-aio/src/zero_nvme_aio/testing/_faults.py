"""Fault plans: each fault selects transfers and says what happens to them."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .. import _native
from .._engine import Engine

__all__ = ["Delay", "Fail", "Fault", "FaultyEngine", "Reorder", "Shorten", "faulty_engine"]

_FOREVER = 2**63


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Selects the transfers that a fault hits: block transfers of the kinds `on` ("read", "write", "sync"), counted
    from 0 in the order in which the engine starts them; number `first`, then every `every`-th, at most `limit` times,
    and only blocks at file offsets of `min_offset` bytes or more.
    """

    on: tuple[str, ...] = ("read", "write")
    first: int = 0
    every: int = 1
    limit: int = _FOREVER
    min_offset: int = 0

    def native_rule(self) -> dict[str, Any]:
        """Return the rule as keyword values for the native engine, which a subclass completes by its `action`;
        ValueError for values out of range.
        """
        unknown = set(self.on) - {"read", "write", "sync"}
        if unknown:
            raise ValueError(f"expected kinds 'read', 'write' or 'sync', got {sorted(unknown)}")
        if self.every < 1:
            raise ValueError(f"expected `every` to be 1 or more, got {self.every}")
        return {
            "on_read": "read" in self.on,
            "on_write": "write" in self.on,
            "on_sync": "sync" in self.on,
            "first": self.first,
            "every": self.every,
            "limit": self.limit,
            "min_offset": self.min_offset,
            "error": 0,
            "fraction": 1.0,
            "delay_us": 0,
            "seed": 0,
        }


@dataclass(frozen=True, kw_only=True)
class Shorten(Fault):
    """Transfers only `fraction` of the bytes, cut at a sector boundary if the transfer is whole sectors; 0 looks like
    the end of the file.
    """

    fraction: float = 0.5

    def native_rule(self) -> dict[str, Any]:
        """Return the rule as keyword values for the native engine; ValueError for values out of range."""
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"expected a fraction from 0 to 1, got {self.fraction}")
        return {**super().native_rule(), "action": 0, "fraction": self.fraction}


@dataclass(frozen=True, kw_only=True)
class Fail(Fault):
    """Transfers nothing; the transfer (or the sync) ends with `error`, an errno."""

    error: int = errno.EIO

    def native_rule(self) -> dict[str, Any]:
        """Return the rule as keyword values for the native engine; ValueError for values out of range."""
        if self.error <= 0:
            raise ValueError(f"expected a positive errno, got {self.error}")
        return {**super().native_rule(), "action": 1, "error": self.error}


@dataclass(frozen=True, kw_only=True)
class Delay(Fault):
    """Performs the transfer and reports its completion `seconds` later."""

    seconds: float = 0.01

    def native_rule(self) -> dict[str, Any]:
        """Return the rule as keyword values for the native engine, the delay in microseconds; ValueError for values out
        of range.
        """
        return {**super().native_rule(), "action": 2, "delay_us": int(self.seconds * 1e6)}


@dataclass(frozen=True, kw_only=True)
class Reorder(Fault):
    """From the first hit on, holds completions until nothing is in flight and then reports them in shuffled order."""

    seed: int = 0

    def native_rule(self) -> dict[str, Any]:
        """Return the rule as keyword values for the native engine; ValueError for values out of range."""
        return {**super().native_rule(), "action": 3, "seed": self.seed}


class FaultyEngine(Engine):
    """An engine over a real backend that follows a plan of `faults`; made by `faulty_engine`. `settings`: `backend`,
    `queue_depth`, `block_bytes` and `threads`, as for `Engine`.
    """

    def __init__(self, faults: Iterable[Fault], **settings: Any) -> None:
        self._plan = _native.FaultPlan([fault.native_rule() for fault in faults])
        arguments = {"backend": "auto", "queue_depth": None, "block_bytes": None, "threads": None}
        arguments.update(settings)
        self._build(**arguments, single_submit=False, overlap_events=True, faults=self._plan)  # type: ignore[arg-type]

    def sibling(self) -> FaultyEngine:
        """Return this engine itself, also for files on other drives: its plan counts the transfers of all drives
        together.
        """
        return self

    @property
    def fired(self) -> int:
        """Return the number of faults injected so far, by all rules together."""
        return self._plan.fired()


def faulty_engine(*faults: Fault, **settings: Any) -> FaultyEngine:
    """Return an engine that injects `faults` into its transfers; `settings` are those of `Engine` (backend,
    queue_depth, block_bytes, threads). ValueError for a fault with values out of range.
    """
    return FaultyEngine(faults, **settings)
