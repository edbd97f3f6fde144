"""Two shards with fragments of two groups, for the tests of the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zero_offload import FragmentPlan, OffloadedUpdate, ShardPlan, TierOptions
from zero_optim_kernels.torch import CPUAdamW

GROUPS: list[dict[str, Any]] = [
    {**CPUAdamW([torch.zeros(1)]).defaults, "lr": 1e-2, "weight_decay": 0.1},
    {**CPUAdamW([torch.zeros(1)]).defaults, "lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.99)},
]
FRAGMENTS = {
    "first": (
        FragmentPlan("embedding", 0, 9_000, 0, 0),
        FragmentPlan("norm", 9_000, 77, 1, 9_216),
        FragmentPlan("matrix", 9_077, 20_011, 0, 9_472),
    ),
    "second": (FragmentPlan("bias", 3, 1, 1, 30_208), FragmentPlan("head", 10, 13_000, 0, 30_464)),
}
NUMELS = {"first": 29_088, "second": 13_056}  # the second has elements in no fragment


def plans(dtype: torch.dtype, *, in_place: bool = False, grad_dtype: torch.dtype | None = None) -> list[ShardPlan]:
    grads = grad_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
    return [ShardPlan(name, NUMELS[name], dtype, grads, FRAGMENTS[name], in_place) for name in NUMELS]


class Lender:
    """Weights in memory; counts what is borrowed."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(11)
        self.tensors = {name: torch.randn(n, generator=generator).to(dtype) for name, n in NUMELS.items()}
        self.held: set[str] = set()
        self.log: list[str] = []

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        assert name not in self.held
        self.held.add(name)
        self.log.append(f"borrow {name}")
        return self.tensors[name]

    def give_back(self, name: str, *, dirty: bool) -> None:
        self.held.remove(name)
        self.log.append(f"give back {name}")

    def flat(self) -> torch.Tensor:
        return torch.cat(list(self.tensors.values()))


def gradient(step: int, shard: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + len(shard))
    return torch.randn(NUMELS[shard], generator=generator, dtype=dtype)


def update_of(
    lender: Any, shards: list[ShardPlan], tier_options: TierOptions | None = None, **more: Any
) -> OffloadedUpdate:
    return OffloadedUpdate(shards, "AdamW", lambda: GROUPS, lender, tier_options, device="cpu", **more)


def one_step(
    update: OffloadedUpdate, step: int, dtype: torch.dtype = torch.float32, scale: float = 0.5, **more: Any
) -> None:
    for shard in NUMELS:
        grad, again = update.borrow_gradient(shard)
        assert not again
        grad.copy_(gradient(step, shard, dtype))
        update.give_back_gradient(shard)
    update.step(grad_scale=scale, **more)
    update.clear_gradients()


def states_of(update: OffloadedUpdate) -> dict[str, dict[str, torch.Tensor]]:
    return dict(update.states())


def same_states(a: Mapping[str, Mapping[str, Any]], b: Mapping[str, Mapping[str, Any]]) -> bool:
    if {n: set(s) for n, s in a.items()} != {n: set(s) for n, s in b.items()}:
        return False
    return all(torch.equal(value, b[name][kind]) for name, state in a.items() for kind, value in state.items())


def by_the_kernels(dtype: torch.dtype, steps: int, absent: dict[int, str] | None = None) -> torch.Tensor:
    """The same update by `CPUAdamW` over one master per fragment, gradients multiplied before."""
    lender = Lender(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    masters: dict[str, nn.Parameter] = {}
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in GROUPS]
    for shard, fragments in FRAGMENTS.items():
        for plan in fragments:
            weights = lender.tensors[shard][plan.start : plan.start + plan.numel]
            masters[plan.name] = nn.Parameter(weights.to(wide, copy=True))
            groups[plan.group]["params"].append(masters[plan.name])
    optimizer = CPUAdamW(groups)
    for step in range(steps):
        for shard, fragments in FRAGMENTS.items():
            scaled = gradient(step, shard, wide) * 0.5
            for plan in fragments:
                skipped = (absent or {}).get(step) == plan.name
                masters[plan.name].grad = None if skipped else scaled[plan.start : plan.start + plan.numel].clone()
        optimizer.step()
    for shard, fragments in FRAGMENTS.items():
        for plan in fragments:
            lender.tensors[shard][plan.start : plan.start + plan.numel] = masters[plan.name].detach().to(dtype)
    return lender.flat()


class OneLender:
    """Weights in a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        return self._tensors[name]

    def give_back(self, name: str, *, dirty: bool) -> None:
        """They stay."""
