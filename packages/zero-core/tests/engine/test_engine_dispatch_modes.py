"""Dispatch modes around forward and backward: selective activation checkpointing, flop counters, the user's own."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from engine_cases import STAGES, config, distance, weights
from torch import nn
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import zero_core
from zero_comm import run_ranks

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default]
VIEWS = [aten.t.default, aten.view.default, aten.slice.Tensor, aten.copy_.default]
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def save_products(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return SAVE if operation in PRODUCTS else RECOMPUTE


def save_all(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """But what is written in place afterwards, which torch refuses to give out again."""
    return RECOMPUTE if operation._schema.is_mutable or operation is aten.empty_like.default else SAVE


def save_views(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return SAVE if operation in VIEWS else RECOMPUTE


def prefer_to_recompute(_context: Any, _operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return RECOMPUTE


POLICIES: dict[str, Any] = {
    "products": save_products,
    "a list": PRODUCTS,
    "all": save_all,
    "views": save_views,
    "nothing": prefer_to_recompute,
}


class Log(TorchDispatchMode):
    """A mode of the user's own: counts operations, but those that only hand tensors on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is not aten.detach.default:
            self.seen[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


class Flops(FlopCounterMode):
    """Counts floating point operations."""

    def __init__(self) -> None:
        super().__init__(display=False)

    @property
    def seen(self) -> int:
        return int(self.get_total_flops())


MODES = {"none": nullcontext, "log": Log, "flops": Flops}
CASES = [(policy, "none") for policy in POLICIES] + [("products", "log"), ("all", "flops"), ("", "log"), ("", "flops")]
REPRESENTATIVES = [("products", "log"), ("views", "none"), ("all", "flops")]


class Block(nn.Module):
    """Reads the weight of a child beside calling it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = dropout(self.down(torch.tanh(self.up(x))) * self.gain, 0.1)
        return (x + h) @ self.down.weight[:, : x.shape[1]].t()


class Checkpointed(nn.Module):
    """Blocks with selective checkpointing; the second one also uses a weight that belongs to nobody inside."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 1, bias=False)
        self.contexts = partial(create_selective_checkpoint_contexts, POLICIES[policy]) if policy else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            if self.contexts is None:
                x = self.run(block, number, x)
            else:
                x = checkpoint(self.run, block, number, x, use_reentrant=False, context_fn=self.contexts)
        return self.head(x)

    def run(self, block: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
        return block(x) * self.head.weight.sum() if number == 1 else block(x)


def made(policy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Checkpointed(policy).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def losses(call: nn.Module, number: int) -> torch.Tensor:
    torch.manual_seed(10 + number)  # dropout draws the same on all ranks, whose batches are the same
    return call(torch.randn(2, 8, dtype=torch.float64)).sum()


def in_one_process(policy: str, mode: str) -> tuple[dict[str, torch.Tensor], Any]:
    model, optimizer = made(policy)
    for number in range(2):
        with MODES[mode]() as watching:
            losses(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), getattr(watching, "seen", None)


def sharded(stages: tuple[int, ...], cases: list[tuple[str, str]]) -> dict[Any, tuple[dict[str, torch.Tensor], Any]]:
    found = {}
    for stage in stages:
        for policy, mode in cases:
            model, optimizer = made(policy)
            settings = config(stage)
            del settings["optimizer"]
            settings["train_micro_batch_size_per_gpu"] = 2
            settings["zero_optimization"].update(
                unit_min_numel=1, reduce_bucket_size=500, stage3_prefetch_bucket_size=500
            )
            engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
            for number in range(2):
                with MODES[mode]() as watching:
                    losses(engine, number).backward()
                engine.step()
            found[stage, policy, mode] = weights(engine), getattr(watching, "seen", None)
            engine.destroy()
    return found


def check(world_size: int, stages: tuple[int, ...], cases: list[tuple[str, str]]) -> None:
    expected = {case: in_one_process(*case) for case in cases}
    for found in run_ranks(sharded, world_size, stages, cases):
        for (stage, *case), (values, seen) in found.items():
            wanted, wanted_seen = expected[tuple(case)]
            assert distance(values, wanted) <= 1e-12, (stage, case)
            assert seen == wanted_seen, (stage, case)


@pytest.mark.parametrize(("world_size", "stages"), [(2, (3,)), (3, (2,)), (1, (0, 1))])
def test_dispatch_modes_see_what_they_see_in_one_process_and_change_nothing(
    world_size: int, stages: tuple[int, ...]
) -> None:
    check(world_size, stages, REPRESENTATIVES if stages == (3,) else [("", "log")])


@pytest.mark.soak
@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_dispatch_modes_at_every_stage(world_size: int) -> None:
    check(world_size, STAGES, CASES)
