"""The requests of a store that may not have ended, by the bytes that they touch."""

from __future__ import annotations

from .._request import Request
from ._transfer import PathRead

__all__ = ["RequestsUnderWay"]


class RequestsUnderWay:
    """The reads and writes that a store has submitted and not yet seen ended. The caller holds the store's lock."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[tuple[int, int, bool, Request | PathRead]]] = {}

    def add(self, name: str, begin: int, end: int, request: Request | PathRead, *, writing: bool) -> None:
        """Record a request that reads, or with `writing` writes, bytes [begin, end) of a name."""
        self._by_name.setdefault(name, []).append((begin, end, writing, request))

    def wait_for_conflicts(self, name: str, begin: int, end: int, *, writing: bool) -> None:
        """Wait for the requests that touch bytes [begin, end) of a name, before a read, or with `writing` a write, of
        these bytes; reads do not wait for reads. Errors stay with the requests, which raise them when waited for.
        """
        still = []
        for low, high, is_write, request in self._by_name.get(name, []):
            if request.done():
                continue
            if low < end and begin < high and (writing or is_write):
                request.settle()
            else:
                still.append((low, high, is_write, request))
        self._by_name[name] = still

    def settle_all(self) -> None:
        """Wait for all requests and forget them. Errors stay with the requests, as in `wait_for_conflicts`."""
        for name in list(self._by_name):
            for *_, request in self._by_name.pop(name):
                request.settle()
