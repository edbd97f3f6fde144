"""Whatever is done to a store, in whatever order, it holds what a dictionary would hold."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from zero_offload import HostStore, NvmeStore
from zero_offload._copy_streams import DeviceCopies

SIZES = {"a": 1, "b": 4096, "c": 5000, "d": 12_289}


class Walk:
    """A store and a dictionary, given the same, by one random operation after the other."""

    def __init__(self, store: HostStore | NvmeStore, buffers: int, seed: int) -> None:
        self.store = store
        self.buffers = buffers
        self.random = Random(seed)
        self.model: dict[str, torch.Tensor] = {}
        self.held: dict[str, int] = {}
        self.count = 0

    def step(self) -> None:
        operations = [self.put, self.acquire, self.acquire, self.borrow, self.hint]
        if self.held:
            operations += 3 * [self.release]
        if self.random.random() < 0.1:
            operations = [self.store.flush, self.seal, self.discard]
        self.random.choice(operations)()

    def next_values(self, name: str) -> torch.Tensor:
        self.count += 1
        return torch.arange(SIZES[name], dtype=torch.float32) + 1000.0 * self.count

    def free_name(self, *, known: bool) -> str | None:
        """A shard that nobody holds, where another buffer may be taken."""
        names = [name for name in (self.model if known else SIZES) if name not in self.held]
        return self.random.choice(names) if names and len(self.held) < self.buffers else None

    def put(self) -> None:
        if name := self.free_name(known=False):
            self.model[name] = self.next_values(name)
            self.store.put(name, self.model[name].clone())

    def acquire(self) -> None:
        name = self.random.choice(sorted(self.held)) if self.held and self.random.random() < 0.3 else None
        if name := name or self.free_name(known=True):
            assert torch.equal(self.store.acquire(name), self.model[name]), name
            self.held[name] = self.held.get(name, 0) + 1

    def release(self) -> None:
        name = self.random.choice(sorted(self.held))
        dirty = self.random.random() < 0.5
        if dirty:
            self.model[name] = self.next_values(name)
            self.store.acquire(name).copy_(self.model[name])
            self.store.release(name, dirty=True)
        self.store.release(name, dirty=False)
        self.held[name] -= 1
        if not self.held[name]:
            del self.held[name]

    def borrow(self) -> None:
        if name := self.free_name(known=True):
            dirty, fresh = self.random.random() < 0.6, self.random.random() < 0.5
            lent = self.store.borrow(name, fresh=fresh and dirty)
            if not (fresh and dirty):
                assert torch.equal(lent, self.model[name]), name
            if dirty:
                self.model[name] = self.next_values(name)
                lent.copy_(self.model[name])
            self.store.give_back(name, dirty=dirty)

    def hint(self) -> None:
        names = self.random.sample(sorted(self.model), self.random.randint(0, len(self.model)))
        if isinstance(self.store, NvmeStore) and self.random.random() < 0.3:
            self.store.expect(names)
        else:
            self.store.prefetch(names)

    def seal(self) -> None:
        if isinstance(self.store, NvmeStore) and not self.held:
            self.store.seal().release()

    def discard(self) -> None:
        if name := self.free_name(known=True):
            self.store.discard(name)
            del self.model[name]
            assert name not in self.store


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["host", "host, copied", "nvme", "nvme, copied"])
def test_a_store_is_a_dictionary(tmp_path: Path, kind: str, seed: int) -> None:
    buffers = 1 + seed % 3
    store: HostStore | NvmeStore = HostStore(device="cpu")
    if kind.startswith("nvme"):
        store = NvmeStore(tmp_path, device="cpu", buffer_count=buffers, host_bytes=5000 * (seed % 2), verify=True)
    if kind.endswith("copied"):
        store._copies = DeviceCopies(torch.device("cpu"))
    walk = Walk(store, buffers, seed)
    for _ in range(300):
        walk.step()
    assert walk.count > 60
    store.close()
