"""A world of any size in which only one rank exists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend "fake")
from torch._C._distributed_c10d import Store

from ..errors import PlanError


class AlikeStore(Store):
    """A store for a world in which every rank does what this one does; each addition counts ``world_size`` times."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._counts: dict[str, int] = {}
        self._values: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` once per rank to a counter, and return its new value."""
        self._counts[key] = self._counts.get(key, 0) + amount * self._world_size
        return self._counts[key]

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value."""
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set the value to ``desired`` if it is ``expected`` (empty: if there is no value); return the value
        afterwards, or ``expected`` if there is none.
        """
        before = expected if isinstance(expected, bytes) else expected.encode()
        if self._values.get(key, b"") == before:
            self.set(key, desired)
        return self._values.get(key, before)

    def get(self, key: str) -> bytes:
        """Return a value. Raises KeyError if there is none."""
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        return self._values.pop(key, None) is not None

    deleteKey = delete_key  # the name by which torch calls it from C++


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Inside the block, initialise torch.distributed as rank ``rank`` of ``world_size``, with collectives that send
    nothing.

    Raises `PlanError` if torch.distributed is initialised already.
    """
    if dist.is_initialized():
        raise PlanError(
            "a dry run needs torch.distributed for itself, and it is initialised: plan before init_process_group and "
            "zero_core.initialize, or in a process of its own"
        )
    store = AlikeStore(world_size)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        if dist.is_initialized():  # scripts end it themselves
            dist.destroy_process_group()
