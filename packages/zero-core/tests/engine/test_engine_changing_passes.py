"""Backward passes that give other parameters a gradient than the pass before: what the user sees is complete."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_core
from zero_comm import run_ranks
from zero_partition import PartitionError

ROWS, WIDTH, STEPS = 6, 4, 5


class Changing(nn.Module):
    """Four parameters in one block, a branch, a projection used without its module, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, step: int, nested: bool) -> torch.Tensor:
        h = self.block(x)
        if step % 2:
            h = h + self.branch(h)
        if step > 1:
            h = h @ self.projection.weight.T
        for layer in [self.shared, self.shared] if step > 2 else [self.shared]:
            h = checkpoint(layer, h, use_reentrant=nested)
        return h.square().mean()


def build() -> Changing:
    torch.manual_seed(7)
    return Changing().double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def frozen(model: Changing, step: int) -> Iterator[nn.Parameter]:
    """Freeze the block's first parameters in every third step, as gradual unfreezing does."""
    chosen = [model.block[0].weight, model.block[2].bias] if step % 3 == 1 else []
    for parameter in chosen:
        parameter.requires_grad_(False)
        yield parameter


def plain_run(nested: bool) -> list[dict[str, torch.Tensor | None]]:
    """The gradients of each step with torch alone, and the weights after the last."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[dict[str, torch.Tensor | None]] = []
    for step in range(STEPS):
        still = list(frozen(model, step))
        model(batch(step), step, nested).backward()
        seen.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        for parameter in still:
            parameter.requires_grad_(True)
    return [*seen, {n: p.detach().clone() for n, p in model.named_parameters()}]


def compare(stage: int, unit_min_numel: int, nested: bool) -> str:
    """Return the differences from torch alone, "" when there are none."""
    expected = plain_run(nested)
    model = build()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": unit_min_numel}
    config = {
        "train_micro_batch_size_per_gpu": ROWS // world_size,
        "data_types": {"param_dtype": "fp64"},
        "steps_per_print": 0,
        "zero_optimization": zero,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]
    wrong = []
    for step in range(STEPS):
        still = list(frozen(model, step))
        engine.backward(engine(batch(step)[rows], step, nested))
        for name, parameter in model.named_parameters():
            gradient = expected[step][name]
            if stage == 0:
                found = parameter.grad
                if (found is None) != (gradient is None) and gradient is not None:
                    wrong.append(f"step {step}: {name} shows no gradient")
                elif found is not None and gradient is not None and not torch.allclose(found, gradient, atol=1e-12):
                    wrong.append(f"step {step}: {name} shows another gradient")
        if stage == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        else:
            wrong += [
                f"step {step}: full_grad of {name} differs"
                for name, parameter in model.named_parameters()
                if (full := engine.full_grad(parameter)) is not None
                and (gradient := expected[step][name]) is not None
                and not torch.allclose(full, gradient, atol=1e-12)
            ]
            engine.clip_grad_norm_(0.05)
        engine.step()
        for parameter in still:
            parameter.requires_grad_(True)
    for name, parameter in model.named_parameters():
        weight = expected[-1][name]
        assert weight is not None
        if not torch.allclose(engine.full_param(parameter), weight, atol=1e-12):
            wrong.append(f"weight of {name} differs")
    engine.destroy()
    return "; ".join(wrong)


def compare_all() -> list[str]:
    """Return the differences at each stage and unit size. At stage 0 on several ranks, no nested passes."""
    found = []
    for stage in (0, 1, 2, 3):
        for unit_min_numel in (1, 1000):
            result = compare(stage, unit_min_numel, nested=stage > 0 or dist.get_world_size() == 1)
            if result:
                found.append(f"stage {stage}, unit_min_numel {unit_min_numel}: {result}")
    return found


def compare_nested() -> str:
    """How passes end that bring more nested gradients than those before, at stage 0."""
    try:
        return compare(0, 1, nested=True)
    except PartitionError as refusal:
        return str(refusal)


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_gradients_of_passes_that_differ_are_complete_where_the_user_sees_them(world_size: int) -> None:
    wrong = [found for found in run_ranks(compare_all, world_size) if found]
    assert not wrong, wrong


def test_an_average_that_was_shown_too_early_is_refused_by_name() -> None:
    for refusal in run_ranks(compare_nested, 2):
        assert "gradient of 'shared.weight' came after" in refusal and "use_reentrant=False" in refusal


def masters_in_bfloat16(stage: int) -> dict[str, torch.Tensor]:
    """The masters after steps of three micro-batches that each bring other gradients than the one before."""
    torch.manual_seed(7)
    model = Changing().bfloat16()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": True},
        "reduce_each_micro_batch": True,
        "steps_per_print": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1000},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(9):
        still = list(frozen(model, step // 3))
        x = batch(10 * step + dist.get_rank()).bfloat16()
        engine.backward(engine(x, step % 3, False))
        engine.step()
        for parameter in still:
            parameter.requires_grad_(True)
    masters = {name: engine.full_param(parameter) for name, parameter in model.named_parameters()}
    engine.destroy()
    return masters


def differing_in_bfloat16() -> list[str]:
    """Return the stages and parameters whose masters have other bits than at stage 0."""
    expected = masters_in_bfloat16(0)
    found = ((stage, masters_in_bfloat16(stage)) for stage in (1, 2, 3))
    return [f"stage {s}: {n}" for s, masters in found for n, m in masters.items() if not torch.equal(m, expected[n])]


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_late_gradients_of_a_micro_batch_are_not_rounded_with_those_of_the_next(world_size: int) -> None:
    for differing in run_ranks(differing_in_bfloat16, world_size):
        assert not differing
