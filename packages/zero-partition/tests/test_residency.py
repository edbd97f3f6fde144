"""The seam to other tiers: the runtime keeps to the call order, whatever the store does between acquire and release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from partition_models import cut, make, tokens

from zero_comm import run_ranks
from zero_partition import (
    DeviceResidency,
    ShardedOptimizer,
    UnitLimits,
    full_parameter,
    gathered,
    set_full_parameter,
)
from zero_precision import PrecisionPolicy


class StrictStore:
    """A tier that is not the device: hands out copies, takes back only what is dirty, and spoils them at release."""

    def __init__(self) -> None:
        self.tier: dict[str, torch.Tensor] = {}
        self.out: dict[str, torch.Tensor] = {}
        self.written: list[str] = []
        self.faults: list[str] = []

    def put(self, name: str, shard: torch.Tensor) -> None:
        self.tier[name] = shard.clone()

    def acquire(self, name: str) -> torch.Tensor:
        if name in self.out:
            self.faults.append(f"{name} acquired twice")
        self.out[name] = self.tier[name].clone()
        return self.out[name]

    def release(self, name: str, *, dirty: bool) -> None:
        shard = self.out.pop(name, None)
        if shard is None:
            self.faults.append(f"{name} released without being acquired")
            return
        if dirty:
            self.tier[name].copy_(shard)
            self.written.append(name)
        elif not torch.equal(shard, self.tier[name]):
            self.faults.append(f"{name} was written but released as clean")
        shard.fill_(torch.nan)

    def prefetch(self, names: Sequence[str]) -> None:
        self.faults += [f"{name} was never put" for name in names if name not in self.tier]

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        return self.acquire(name)

    def give_back(self, name: str, *, dirty: bool) -> None:
        self.release(name, dirty=dirty)

    @property
    def resident_bytes(self) -> int:
        return sum(shard.nbytes for shard in (*self.tier.values(), *self.out.values()))

    def close(self) -> None:
        self.tier.clear()

    def flush(self) -> None:
        self.faults += [f"{name} is still out at flush" for name in self.out]


def train_on(strict: bool, half: bool, threshold: int) -> dict[str, Any]:
    model = make().float() if half else make()
    policy = PrecisionPolicy.bf16() if half else None
    store = StrictStore() if strict else DeviceResidency()
    model.blocks[0][0].weight.requires_grad_(False)
    limits = UnitLimits(min_numel=1, persistence_threshold=threshold)
    parts = cut(model, 3, policy=policy, limits=limits, residency=store)
    optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), parts)
    for step in range(3):
        model(tokens(step)).backward()
        optimizer.step()
    with gathered(parts, model.norm.weight, modifier_rank=0), torch.no_grad():
        model.norm.weight.mul_(2)
    set_full_parameter(parts, model.norm.bias, torch.ones(7, dtype=torch.float32 if half else torch.float64))
    model(tokens(3)).backward()
    optimizer.step()
    facts = {"weights": [full_parameter(parts, p) for p in model.parameters()]}
    facts["memory"] = sum(parts.memory().values())
    if isinstance(store, StrictStore):
        facts |= {
            "faults": store.faults,
            "out": list(store.out),
            "written": set(store.written),
            "units": {u.name for u in parts.units if u.plan.trainable},
        }
    return facts


@pytest.mark.parametrize("threshold", [0, 20], ids=["all released", "some persistent"])
@pytest.mark.parametrize("half", [True, False], ids=["with masters", "without"])
def test_a_store_that_hands_out_copies_gives_the_same_weights_and_sees_a_clean_protocol(
    half: bool, threshold: int
) -> None:
    results = (run_ranks(train_on, 2, strict, half, threshold) for strict in (True, False))
    for strict, plain in zip(*results, strict=True):
        assert strict["faults"] == [] and strict["out"] == []
        assert strict["written"] == strict["units"]  # what trains went back, what is frozen did not
        assert all(torch.equal(a, b) for a, b in zip(strict["weights"], plain["weights"], strict=True))


def test_the_device_store_hands_out_the_shard_itself_and_names_the_unknown() -> None:
    store, shard = DeviceResidency(), torch.ones(3)
    store.put("block.0", shard)
    store.prefetch(["block.0"])
    assert store.acquire("block.0") is shard
    store.release("block.0", dirty=True)
    store.flush()
    with pytest.raises(KeyError, match="block.1"):
        store.acquire("block.1")
