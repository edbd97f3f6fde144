"""Passes of sharded models: what is present when, what stays readable, and what is gone afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from partition_models import Stack, cut, gathered_bytes, groups, make, tokens
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from zero_comm import run_ranks
from zero_partition import (
    PartitionError,
    PartitionOptions,
    ShardedOptimizer,
    UnitLimits,
    UnitState,
    full_parameter,
    partition,
)
from zero_precision import PrecisionPolicy


def presence() -> dict[str, Any]:
    model = make(blocks=4)
    parts = cut(model, 3, limits=UnitLimits(min_numel=1))
    most: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: most.append(gathered_bytes(parts)))
    sizes = [u.layout.numel * 8 for u in parts.units if u.releasable]
    facts: dict[str, Any] = {"before": gathered_bytes(parts)}
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    for step in range(2):
        loss = model(tokens(step))
        facts[f"after forward {step}"] = gathered_bytes(parts)
        loss.backward()
        facts[f"after backward {step}"] = gathered_bytes(parts)
        optimizer.step()
        facts[f"after step {step}"] = gathered_bytes(parts)
    with torch.no_grad():
        model(tokens())
    facts["after evaluation"] = gathered_bytes(parts)
    facts["released"] = all(u.state is UnitState.RELEASED for u in parts.units if u.releasable)
    return {"facts": facts, "most": max(most), "all": sum(sizes), "sizes": sizes}


def test_units_take_no_memory_outside_passes_and_not_all_of_it_inside() -> None:
    for result in run_ranks(presence, 2):
        facts = result["facts"]
        assert facts.pop("released") is True
        between = [facts.pop(f"after forward {step}") for step in range(2)]  # the unit that backward begins with
        assert set(between) <= set(result["sizes"])
        assert set(facts.values()) == {0}, facts
        assert 0 < result["most"] <= result["all"]


def bounded(max_live: int) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16)) for _ in range(8)]).double()
    options = PartitionOptions(
        stage=3, policy=PrecisionPolicy.full(torch.float64), limits=UnitLimits(min_numel=1), max_live_numel=max_live
    )
    parts = partition(model, groups(), options)
    most = [0]
    for layer in model:
        layer.register_forward_hook(lambda *_: most.append(gathered_bytes(parts) // 8))
        layer.register_full_backward_hook(lambda *_: most.append(gathered_bytes(parts) // 8))
    for _ in range(3):
        model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
        parts.runtime.reducer.clear()
    return max(most)


def test_max_live_parameters_bounds_what_is_gathered() -> None:
    unit = 384  # 272 elements, padded to two shards that are multiples of 64
    assert max(run_ranks(bounded, 2, 2 * unit)) <= 3 * unit
    assert min(run_ranks(bounded, 2, 100 * unit)) > 3 * unit


def hooks_of(model: nn.Module) -> int:
    names = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
    modules = sum(len(getattr(m, name, ())) for m in model.modules() for name in names)
    return modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def closes(stage: int) -> dict[str, Any]:
    model, reference = make(), make()
    identities = [id(p) for p in model.parameters()]
    kinds = [type(m) for m in model.modules()]
    parts = cut(model, stage)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    during = hooks_of(model)
    model(tokens()).backward()
    optimizer.step()
    reference(tokens()).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    parts.close()
    values = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    alone = float(model(tokens(1)).detach() - reference(tokens(1)).detach())
    model(tokens(1)).backward()  # plain torch again
    return {
        "same parameters": identities == [id(p) for p in model.parameters()],
        "same modules": kinds == [type(m) for m in model.modules()],
        "hooks": (during > 0, hooks_of(model)),
        "values": values,
        "alone": abs(alone),
        "gradients": all(p.grad is not None for p in model.parameters()),
        "tied": model.head.weight is model.embedding.weight,
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_close_gives_the_whole_model_back_without_a_hook_and_with_the_same_parameters(stage: int) -> None:
    for facts in run_ranks(closes, 2, stage):
        assert facts["same parameters"] and facts["same modules"] and facts["tied"] and facts["gradients"]
        assert facts["hooks"] == (True, 0)
        assert facts["values"] < 1e-12 and facts["alone"] < 1e-12


class Recomputed(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for i, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=bool(i % 2))
        return self.head(self.norm(x)).square().mean()


def outer_hooks(kind: str) -> tuple[float, int]:
    """Train under saved-tensor hooks of the user's own, or with recomputation; distance from one plain process."""
    calls = [0]

    def count(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x

    contexts = {"save_on_cpu": save_on_cpu, "identity": lambda: saved_tensors_hooks(count, lambda x: x)}
    torch.manual_seed(0)
    model = (Recomputed() if kind == "checkpoint" else Stack()).double()
    reference = Stack().double()
    reference.load_state_dict(model.state_dict())
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    parts = cut(model, 3)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    for step in range(3):
        if kind in contexts:
            with contexts[kind]():
                loss = model(tokens(step))
        else:
            loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        reference(tokens(step)).backward()
        expected.step()
        reference.zero_grad()
    wholes = [full_parameter(parts, p) for p in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(wholes, reference.parameters(), strict=True)), calls[0]


@pytest.mark.parametrize("kind", ["none", "save_on_cpu", "identity", "checkpoint"])
def test_the_users_saved_tensor_hooks_and_recomputation_still_work(kind: str) -> None:
    for deviation, calls in run_ranks(outer_hooks, 2, kind):
        assert deviation < 1e-12
        assert (calls > 0) == (kind == "identity")


def released_state_dict() -> dict[str, Any]:
    model = make()
    parts = cut(model, 3)
    state = model.state_dict()
    return {
        "meta": all(
            value.is_meta
            for name, value in state.items()
            if parts.find(dict(model.named_parameters(remove_duplicate=False))[name])[0].releasable
        ),  # type: ignore[index]
        "shapes": {n: tuple(v.shape) for n, v in state.items()}
        == {n: tuple(v.shape) for n, v in make().state_dict().items()},
    }


def test_a_state_dict_of_released_parameters_holds_meta_tensors_of_the_true_shape() -> None:
    for facts in run_ranks(released_state_dict, 2):
        assert facts["meta"] and facts["shapes"]


def different(what: str) -> str:
    model = make()
    rank = torch.distributed.get_rank()
    if what == "shape" and rank == 1:
        model.blocks[1][0] = nn.Linear(7, 14).double()
    if what == "frozen" and rank == 1:
        model.norm.weight.requires_grad_(False)
    if what == "missing" and rank == 1:
        del model.blocks[2]
    try:
        cut(model, 1)
    except PartitionError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize(
    ("what", "name"), [("shape", "blocks.1.0.weight"), ("frozen", "norm.weight"), ("missing", "blocks.2")]
)
def test_ranks_with_different_models_are_refused_on_every_rank_by_the_first_name_that_differs(
    what: str, name: str
) -> None:
    for text in run_ranks(different, 2, what):
        assert "rank 0 and rank 1 have different models" in text and name in text


def seeds() -> list[torch.Tensor]:
    model = make(seed=torch.distributed.get_rank())
    model.register_buffer("scale", torch.full((3,), float(torch.distributed.get_rank())))
    parts = cut(model, 3)
    return [full_parameter(parts, p) for p in model.parameters()] + [model.scale.clone()]


def test_every_rank_starts_with_rank_0s_values_and_buffers() -> None:
    expected = [*make(seed=0).parameters(), torch.zeros(3)]
    for values in run_ranks(seeds, 2):
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


def test_one_rank_needs_no_process_group_and_releases_nothing() -> None:
    model, reference = make(), make()
    parts = cut(model, 3)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    model(tokens()).backward()
    optimizer.step()
    reference(tokens()).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert copy.deepcopy(parts.layout) == parts.layout
