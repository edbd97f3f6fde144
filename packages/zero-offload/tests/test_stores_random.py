"""Whatever is done to a store, in whatever order, it holds what a dictionary would hold."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from zero_offload import HostStore, NvmeStore
from zero_offload._lanes import DeviceCopies

SIZES = {"a": 1, "b": 1000, "c": 4096, "d": 5000, "e": 12_289}
NAMES = st.sampled_from(sorted(SIZES))


class Stores(RuleBasedStateMachine):
    """One store and a dictionary, given the same."""

    kind = "nvme"

    @initialize(buffers=st.integers(2, 4), kept=st.sampled_from([0, 5000]))
    def open(self, buffers: int, kept: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.buffers = buffers
        self.store: HostStore | NvmeStore = HostStore(device="cpu")
        if self.kind.startswith("nvme"):
            self.store = NvmeStore(self.folder.name, device="cpu", buffer_count=buffers, host_bytes=kept, verify=True)
        if self.kind.endswith("copied"):
            self.store._copies = DeviceCopies(torch.device("cpu"))
        self.model: dict[str, torch.Tensor] = {}
        self.held: dict[str, int] = {}
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    def next_values(self, name: str) -> torch.Tensor:
        self.count += 1
        return torch.arange(SIZES[name], dtype=torch.float32) + 1000.0 * self.count

    @rule(name=NAMES)
    def put(self, name: str) -> None:
        if not self.held.get(name) and len(self.held) < self.buffers - 1:
            self.model[name] = self.next_values(name)
            self.store.put(name, self.model[name].clone())

    @rule(name=NAMES, again=st.booleans())
    def acquire(self, name: str, again: bool) -> None:
        if name in self.model and (len(self.held) < self.buffers - 1 or (again and name in self.held)):
            assert torch.equal(self.store.acquire(name), self.model[name])
            self.held[name] = self.held.get(name, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), dirty=st.booleans())
    def release(self, data: st.DataObject, dirty: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        if dirty:
            self.model[name] = self.next_values(name)
            shard = self.store.acquire(name)
            shard.copy_(self.model[name])
            self.store.release(name, dirty=True)
        self.store.release(name, dirty=False)
        self.held[name] -= 1
        if not self.held[name]:
            del self.held[name]

    @rule(name=NAMES, fresh=st.booleans(), dirty=st.booleans())
    def borrow(self, name: str, fresh: bool, dirty: bool) -> None:
        if name in self.model and name not in self.held and len(self.held) < self.buffers - 1:
            lent = self.store.borrow(name, fresh=fresh and dirty)
            if not (fresh and dirty):
                assert torch.equal(lent, self.model[name])
            if dirty:
                self.model[name] = self.next_values(name)
                lent.copy_(self.model[name])
            self.store.give_back(name, dirty=dirty)

    @rule(names=st.lists(NAMES, max_size=5), for_borrowing=st.booleans())
    def hint(self, names: list[str], for_borrowing: bool) -> None:
        known = [name for name in names if name in self.model]
        if for_borrowing and isinstance(self.store, NvmeStore):
            self.store.expect(known)
        else:
            self.store.prefetch(known)

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @precondition(lambda self: self.kind.startswith("nvme") and not self.held)
    @rule()
    def seal(self) -> None:
        assert isinstance(self.store, NvmeStore)
        self.store.seal().release()

    @rule(name=NAMES)
    def discard(self, name: str) -> None:
        if name in self.model and name not in self.held:
            self.store.discard(name)
            del self.model[name]
            assert name not in self.store

    @precondition(lambda self: not self.held)
    @rule()
    def look_at_everything(self) -> None:
        for name, want in self.model.items():
            assert torch.equal(self.store.acquire(name), want), name
            self.store.release(name, dirty=False)


@pytest.mark.parametrize("kind", ["host", "host, copied", "nvme", "nvme, copied"])
def test_a_store_is_a_dictionary(kind: str) -> None:
    class Chosen(Stores):
        pass

    Chosen.kind = kind
    case = Chosen.TestCase
    case.settings = settings(
        max_examples=12, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()
