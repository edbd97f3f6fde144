"""How a model is cut into units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_partition import PartitionError, UnitLimits, UnitPlan, plan_units
from zero_partition.units import check_trainable_shards, replicated_parameters

SMALL = UnitLimits(max_numel=10_000, min_numel=1)


def plans_of(model: nn.Module, limits: UnitLimits = SMALL, dtype: torch.dtype | None = None) -> list[UnitPlan]:
    return plan_units(model, limits, trainable=lambda p: p.requires_grad, dtype_of=lambda _name, p: dtype or p.dtype)


def names(plans: list[UnitPlan]) -> list[list[str]]:
    return [list(plan.parameters) for plan in plans]


def block(width: int = 4) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 2, 8)


class Model(nn.Module):
    def __init__(self, container: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        blocks = [block() for _ in range(3)]
        self.blocks = nn.Sequential(*blocks) if container is nn.Sequential else nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_every_block_of_a_list_or_sequence_is_one_unit(container: type[nn.Module]) -> None:
    plans = plans_of(Model(container))
    for i in range(3):
        plan = plans[1 + i]
        assert plan.name.startswith(f"blocks.{i} ") and list(plan.members) == [f"blocks.{i}"]
        assert all(name.startswith(f"blocks.{i}.") for name in plan.parameters)


def test_the_entries_of_a_module_dict_are_units() -> None:
    model = nn.ModuleDict({"left": nn.Sequential(nn.Linear(2, 2)), "right": nn.Bilinear(2, 2, 2)})
    assert names(plans_of(model)) == [["left.0.weight", "left.0.bias"], ["right.weight", "right.bias"]]


def test_units_are_in_module_order_and_hold_every_parameter_once() -> None:
    model = Model(nn.ModuleList)
    planned = [name for plan in plans_of(model) for name in plan.parameters]
    assert planned == [name for name, _ in model.named_parameters()]


def test_a_block_above_the_budget_is_opened() -> None:
    model = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})])
    assert len(plans_of(model, UnitLimits(max_numel=20, min_numel=1))) == 2
    assert len(plans_of(nn.ModuleList([block()]), UnitLimits(max_numel=100_000, min_numel=1))) == 1
    assert len(plans_of(nn.ModuleList([block()]), UnitLimits(max_numel=100, min_numel=1))) > 1


class Layer(nn.Module):
    """70,000,000 elements, with ``lists`` (by name) beside them."""

    def __init__(self, **lists: nn.Module) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(n, m, bias=False) for n, m in ((7000, 5000), (5000, 7000)))
        for name, found in lists.items():
            setattr(self, name, found)


def mlps(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(count)]


@pytest.mark.parametrize(
    ("lists", "whole"),
    [
        ({}, True),
        ({"steps": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])}, True),  # of single operations
        ({"inner": nn.ModuleList(mlps(1))}, True),
        ({"experts": nn.ModuleList(mlps(2))}, False),
        ({"experts": nn.ModuleDict({"a": mlps(1)[0], "b": mlps(1)[0]})}, False),
    ],
)
def test_a_layer_stays_one_unit_unless_it_holds_layers(lists: dict[str, nn.Module], whole: bool) -> None:
    with torch.device("meta"):
        model = nn.ModuleList([Layer(**lists), nn.Linear(2, 2)])
    first = plans_of(model, UnitLimits(min_numel=1))[0]
    assert len(first.parameters) == (len(list(model[0].parameters())) if whole else 1)
    told = plans_of(model, UnitLimits(max_numel=64_000_000, min_numel=1))
    assert len(told[0].parameters) == 1


class Holder(nn.Module):
    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held


def test_a_layer_above_a_billion_elements_is_opened() -> None:
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(25_000, 25_000, bias=False), nn.Linear(25_000, 20_000, bias=False))
    assert len(plans_of(nn.ModuleList([Holder(layer)]), UnitLimits(min_numel=1))) == 2


def test_small_leftovers_are_merged_up_to_the_minimum() -> None:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)])  # 12 elements each
    assert [len(plan.parameters) for plan in plans_of(model, UnitLimits(max_numel=1000, min_numel=36))] == [6, 6]
    merged = plans_of(model, UnitLimits(max_numel=1000, min_numel=1000))
    assert len(merged) == 1 and list(merged[0].members) == [str(i) for i in range(6)]


def test_a_tied_parameter_has_one_place_and_all_its_owners_as_members() -> None:
    model = Model(nn.ModuleList)
    model.head.weight = model.embedding.weight
    plans = plans_of(model)
    holding = [plan for plan in plans if "embedding.weight" in plan.parameters]
    assert len(holding) == 1 and {"embedding", "head"} <= set(holding[0].members)
    assert sum(len(plan.parameters) for plan in plans) == len(list(model.parameters()))
    assert not any("head.weight" in plan.parameters for plan in plans)


def test_dtypes_and_frozen_parameters_make_units_of_their_own() -> None:
    model = nn.Sequential(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4).double(), "c": nn.Linear(4, 4)}))
    model[0]["c"].requires_grad_(False)
    found = {(plan.dtype, plan.trainable): set(plan.parameters) for plan in plans_of(model)}
    assert found == {
        (torch.float32, True): {"0.a.weight", "0.a.bias"},
        (torch.float64, True): {"0.b.weight", "0.b.bias"},
        (torch.float32, False): {"0.c.weight", "0.c.bias"},
    }
    assert len({plan.name for plan in plans_of(model)}) == 3


def test_parameters_below_the_persistence_threshold_are_persistent() -> None:
    plans = plans_of(nn.Sequential(nn.Linear(8, 8)), UnitLimits(max_numel=1000, min_numel=1, persistence_threshold=64))
    assert {name: plan.persistent for plan in plans for name in plan.parameters} == {"0.weight": False, "0.bias": True}


class Oddities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.codes = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
        self.weight = nn.Parameter(torch.zeros(5, 5))


def test_single_elements_are_persistent_and_what_cannot_be_sharded_is_left_out_with_a_reason() -> None:
    model = Oddities()
    where = {name: plan.persistent for plan in plans_of(model) for name in plan.parameters}
    assert where == {"scale": True, "one": True, "weight": False}
    assert replicated_parameters(model) == {
        "empty": "it is empty",
        "codes": "its dtype torch.int8 is not floating point",
    }
    check_trainable_shards(model)


class Wrapped(torch.Tensor):
    pass


def test_a_trainable_tensor_subclass_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(Wrapped))
    with pytest.raises(PartitionError, match="'weight' requires gradients but .*tensor subclass \\(Wrapped\\)"):
        check_trainable_shards(model)
    model.weight.requires_grad_(False)
    check_trainable_shards(model)
    assert "weight" in replicated_parameters(model)
