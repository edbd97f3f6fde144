"""Whole values for the user, outside a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from partition_models import cut, make, tokens
from torch import nn

from zero_comm import run_ranks
from zero_partition import (
    PartitionError,
    ShardedOptimizer,
    UnitState,
    full_gradient,
    full_parameter,
    full_state,
    gathered,
    set_full_gradient,
    set_full_parameter,
    set_full_state,
)
from zero_precision import PrecisionPolicy

STAGES = [0, 1, 2, 3]


def read_inside() -> dict[str, Any]:
    reference, model = make(), make()
    parts = cut(model, 3)
    expected = dict(reference.named_parameters())
    released = all(bool(p.isnan().all()) for p in model.parameters() if p.numel() > 1)
    with gathered(parts, model.blocks[1].parameters()):
        right = all(torch.equal(p, expected[f"blocks.1.{n}"]) for n, p in model.blocks[1].named_parameters())
        with gathered(parts, model.parameters()):  # nesting
            everything = all(torch.equal(p, expected[n]) for n, p in model.named_parameters())
        still = all(torch.equal(p, expected[f"blocks.1.{n}"]) for n, p in model.blocks[1].named_parameters())
    with gathered(parts, [model.norm.weight, "not a parameter", nn.Parameter(torch.ones(2))]):
        mixed = torch.equal(model.norm.weight, expected["norm.weight"])
    with gathered(parts, model.head.weight):
        single = torch.equal(model.embedding.weight, expected["embedding.weight"])
    states = {u.state for u in parts.units if u.releasable}
    return {
        "released": released,
        "right": right,
        "everything": everything,
        "still": still,
        "mixed": mixed,
        "single": single,
        "afterwards": states == {UnitState.RELEASED},
    }


def test_inside_gathered_values_are_whole_and_afterwards_absent_again() -> None:
    for facts in run_ranks(read_inside, 2):
        assert all(facts.values()), facts


def change_inside(stage: int, master: bool) -> dict[str, Any]:
    torch.manual_seed(5)
    model = make().float() if master else make()
    policy = PrecisionPolicy.bf16() if master else None
    parts = cut(model, stage, policy=policy)
    rank = parts.rank
    with gathered(parts, [model.norm.weight, model.blocks[0][0].bias], modifier_rank=1), torch.no_grad():
        model.norm.weight.fill_(10.0 + rank)  # in place
        model.blocks[0][0].bias.data = torch.full_like(model.blocks[0][0].bias, 20.0 + rank)  # replaced
    with gathered(parts, model.parameters()):
        seen = model.norm.weight.tolist(), model.blocks[0][0].bias.tolist()
    wholes = full_parameter(parts, model.norm.weight), full_parameter(parts, model.blocks[0][0].bias)
    return {"seen": [set(s) for s in seen], "whole": [set(w.tolist()) for w in wholes], "dtype": wholes[0].dtype}


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_what_the_modifier_rank_writes_becomes_every_ranks_value_and_its_master(stage: int, master: bool) -> None:
    for facts in run_ranks(change_inside, 2, stage, master):
        assert facts["seen"] == facts["whole"] == [{11.0}, {21.0}]
        assert facts["dtype"] == (torch.float32 if master else torch.float64)


def write_outside(how: str) -> str:
    model = make()
    parts = cut(model, 3)
    try:
        if how == "fill":
            with torch.no_grad():
                model.norm.weight.fill_(1.0)
        else:
            model.norm.weight.data = torch.full((7,), torch.nan, dtype=torch.float64)
        model(tokens())
        parts.close()
    except PartitionError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize("how", ["fill", "replace"])
def test_a_released_parameter_that_was_written_or_replaced_is_named(how: str) -> None:
    for text in run_ranks(write_outside, 2, how):
        assert "'norm.weight'" in text and "gathered(" in text


def whole_values(stage: int) -> dict[str, float | bool]:
    model, reference = make(), make()
    reference.blocks[2][0].weight.requires_grad_(False)
    model.blocks[2][0].weight.requires_grad_(False)
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    parts = cut(model, stage)
    optimizer = ShardedOptimizer(inner, parts)
    expected = torch.optim.Adam(reference.parameters(), lr=0.01)
    for step in range(2):
        reference(tokens(step)).backward()
        model(tokens(step)).backward()
        if step == 0:
            optimizer.step()
            expected.step()
            reference.zero_grad()
    pairs = [(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    trained = [(p, q) for p, q in pairs if q.requires_grad]
    gradients = [(full_gradient(parts, p), q.grad) for p, q in trained]
    moments = [
        (full_state(parts, optimizer, p, k), expected.state[q][k])
        for p, q in trained
        for k in ("exp_avg", "exp_avg_sq")
    ]
    with pytest.raises(PartitionError, match="no optimizer state 'momentum' per element; it has exp_avg, exp_avg_sq"):
        full_state(parts, optimizer, trained[0][0], "momentum")
    frozen = next(p for p in model.parameters() if not p.requires_grad)
    try:
        full_state(parts, optimizer, frozen, "exp_avg")
        refusal = "none"
    except PartitionError as error:
        refusal = str(error)
    try:
        full_parameter(parts, nn.Parameter(torch.ones(3)))
        foreign = "none"
    except PartitionError as error:
        foreign = str(error)
    return {
        "parameters": max(float((full_parameter(parts, p) - q).abs().max()) for p, q in pairs),
        "gradients": max(float((a - b).abs().max()) for a, b in gradients),
        "states": max(float((a - b).abs().max()) for a, b in moments),
        "shapes": all(a.shape == b.shape for a, b in gradients + moments),
        "frozen has none": full_gradient(parts, frozen) is None and "'blocks.2.0.weight' is not trained" in refusal,
        "foreign": "does not belong" in foreign,
    }


@pytest.mark.parametrize("stage", STAGES)
def test_whole_parameters_gradients_and_states_are_those_of_one_process(stage: int) -> None:
    for facts in run_ranks(whole_values, 3, stage):
        assert facts["parameters"] < 1e-12 and facts["gradients"] < 1e-12 and facts["states"] < 1e-12
        assert facts["shapes"] and facts["frozen has none"] and facts["foreign"]


def refuses(name: str, parameter: nn.Parameter) -> bool:
    try:
        return parameter.grad is not None
    except PartitionError as refusal:
        return f"parameter '{name}'" in str(refusal) and "engine.full_grad" in str(refusal)


def visible_gradients(stage: int) -> float | bool:
    model, reference = make(), make()
    parts = cut(model, stage)
    model(tokens(parts.rank)).backward()
    if stage >= 1:
        return all(refuses(name, p) == p.requires_grad for name, p in model.named_parameters())
    (sum(reference(tokens(rank)) for rank in range(2)) / 2).backward()
    return max(
        float((p.grad - q.grad).abs().max()) for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


def test_stage_0_shows_averaged_gradients_and_sharded_stages_refuse_to() -> None:
    assert max(run_ranks(visible_gradients, 2, 0)) < 1e-12
    assert run_ranks(visible_gradients, 2, 2) == run_ranks(visible_gradients, 2, 3) == [True, True]


class Opens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.parts: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with gathered(self.parts, self.inner.weight):
            return self.inner(x)


def open_in_forward() -> str:
    model = Opens().double()
    model.parts = cut(model, 3)
    try:
        model(torch.ones(1, 4, dtype=torch.float64))
    except PartitionError as error:
        return str(error)
    return "none"


def test_gathered_inside_a_forward_pass_is_refused_on_every_rank() -> None:
    assert all("inside a forward or backward pass" in text for text in run_ranks(open_in_forward, 2))


def replace_all(stage: int) -> dict[str, bool]:
    """Every rank passes another value: rank 0's counts."""
    model = make()
    parts = cut(model, stage)
    optimizer = ShardedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), parts)
    parameter = model.blocks[1][0].weight
    value = torch.arange(91, dtype=torch.float64).view(13, 7) + 100 * parts.rank
    expected = torch.arange(91, dtype=torch.float64).view(13, 7)
    early = []
    for call in (
        lambda: set_full_gradient(parts, parameter, value),
        lambda: set_full_state(parts, optimizer, parameter, "exp_avg", value),
    ):
        try:
            call()
        except PartitionError as error:
            early.append(str(error))
    model(tokens()).backward()
    optimizer.step()
    set_full_parameter(parts, parameter, value)
    set_full_state(parts, optimizer, parameter, "exp_avg", value)
    facts = {
        "refused before there is one": len(early) == 2 and all("'blocks.1.0.weight'" in text for text in early),
        "parameter": torch.equal(full_parameter(parts, parameter), expected),
        "state": torch.equal(full_state(parts, optimizer, parameter, "exp_avg"), expected),
    }
    with gathered(parts, parameter):
        facts["seen by forward"] = torch.equal(parameter, expected)
    model(tokens()).backward()
    set_full_gradient(parts, parameter, value)
    facts["gradient"] = torch.equal(full_gradient(parts, parameter), expected)  # type: ignore[arg-type]
    others = full_parameter(parts, model.blocks[1][2].weight)
    facts["neighbours untouched"] = bool(others.abs().max() < 10)
    return facts


@pytest.mark.parametrize("stage", STAGES)
def test_whole_values_are_replaced_by_rank_0s(stage: int) -> None:
    for facts in run_ranks(replace_all, 2, stage):
        assert all(facts.values()), facts


def replace_inside_a_block(stage: int, modifier_rank: int | None) -> list[float]:
    """Return an element that rank 0 has replaced inside a block: seen there, and behind it."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    parts = cut(model, stage)
    with gathered(parts, model[0].weight, modifier_rank):
        set_full_parameter(parts, model[0].weight, torch.full((4, 4), 3.0 + parts.rank))
        inside = float(model[0].weight[1, 2])
    return [inside, float(full_parameter(parts, model[0].weight)[1, 2])]


@pytest.mark.parametrize("modifier_rank", [None, 0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_value_that_is_replaced_while_it_is_gathered_stays(stage: int, modifier_rank: int | None) -> None:
    assert run_ranks(replace_inside_a_block, 2, stage, modifier_rank) == [[3.0, 3.0]] * 2


def write_past_torch_around_a_replacement(stage: int) -> list[float]:
    """Return elements that every rank has written through NumPy in a block before and after another was replaced."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parts = cut(model, stage)
    with gathered(parts, model.parameters()):
        model[0].bias.detach().numpy()[1] = 5.0
        set_full_parameter(parts, model[0].weight, torch.full((4, 4), 3.0))
        model[0].weight.detach().numpy()[1, 2] = 7.0
    read = {name: full_parameter(parts, getattr(model[0], name)) for name in ("weight", "bias")}
    return [float(read["bias"][1]), float(read["weight"][1, 2]), float(read["weight"][0, 0])]


@pytest.mark.parametrize("stage", STAGES)
def test_writes_past_torch_count_before_and_after_a_replacement_in_the_block(stage: int) -> None:
    assert run_ranks(write_past_torch_around_a_replacement, 2, stage) == [[5.0, 7.0, 3.0]] * 2


def set_what_one_rank_cannot(stage: int) -> list[str]:
    """Return what each refused call raised here: only rank 0 has a fragment of the parameter, or another shape."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    parts = cut(model, stage)
    optimizer = ShardedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), parts)
    first = model[0].weight
    short = torch.zeros(4, 4 if parts.rank else 3)
    raised = []
    for call in (
        lambda: set_full_state(parts, optimizer, model[1].weight, "exp_avg", torch.zeros(1, 4)),
        lambda: set_full_parameter(parts, first, short),
    ):
        with pytest.raises(PartitionError) as error:
            call()
        raised.append(str(error.value))
    set_full_parameter(parts, first, torch.ones(4, 4))
    assert full_parameter(parts, first).sum() == 16
    return raised


@pytest.mark.parametrize("stage", STAGES)
def test_a_value_that_one_rank_cannot_take_is_refused_on_every_rank(stage: int) -> None:
    here, there = run_ranks(set_what_one_rank_cannot, 2, stage)
    assert here == there
    assert "'1.weight' has no optimizer state 'exp_avg' yet" in here[0] and "expected (4, 4)" in here[1]


def wholes(stage: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.register_parameter("order", nn.Parameter(torch.arange(3) + torch.distributed.get_rank(), requires_grad=False))
    parts = cut(model, stage)
    model[1] = nn.Linear(3, 2)
    parameters: dict[str, Any] = {"order": model.order, "1.weight": model[1].weight, "": nn.Parameter(torch.ones(2))}
    refused = {}
    for name, parameter in parameters.items():
        with pytest.raises(PartitionError) as error:
            full_gradient(parts, parameter)
        refused[name] = str(error.value)
    found: dict[str, Any] = {"order": full_parameter(parts, model.order), "refused": refused}
    found["equal"] = torch.equal(full_parameter(parts, model[1].weight), model[1].weight)
    for parameter, value in ((model.order, torch.tensor([2, 0, 1])), (model[1].bias, torch.tensor([0.5, 1.5]))):
        set_full_parameter(parts, parameter, value + torch.distributed.get_rank())
    with pytest.raises(PartitionError, match=r"'order' has shape \(2,\), expected \(3,\)"):
        set_full_parameter(parts, model.order, torch.ones(2 + torch.distributed.get_rank()))
    return {**found, "written": [model.order.tolist(), model[1].bias.tolist()]}


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_that_no_unit_holds_are_read_and_written_and_named(stage: int) -> None:
    for found in run_ranks(wholes, 2, stage):
        assert found["order"].tolist() == [0, 1, 2] and found["equal"]
        assert found["written"] == [[2, 0, 1], [0.5, 1.5]]
        refused = found["refused"]
        assert "parameter 'order' has no gradient" in refused["order"] and "torch.int64" in refused["order"]
        assert "parameter '1.weight' was put into the model after initialize" in refused["1.weight"]
        assert "shape (2,) does not belong to this engine's model" in refused[""]
