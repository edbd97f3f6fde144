from __future__ import annotations

from typing import Any

import pytest

from zero_plan import (
    PlanError,
    count_parameters,
    estimate_zero1,
    estimate_zero1_live,
    estimate_zero2,
    estimate_zero2_live,
    estimate_zero3,
    estimate_zero3_live,
)

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402


class Tied(nn.Module):
    """An embedding and a head that share one weight, around a block of two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.block = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embedding.weight


EXPECTED = (800 + 8 * 32 + 32 + 32 * 8 + 8, 800)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_parameters_count_once_on_any_device(device: str) -> None:
    with torch.device(device):
        assert count_parameters(Tied()) == EXPECTED


def test_a_fake_model_is_counted_like_a_real_one() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert count_parameters(Tied()) == EXPECTED


def test_separate_parameters_over_one_memory_count_once() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embedding.weight.data)
    assert model.head.weight is not model.embedding.weight
    assert count_parameters(model) == EXPECTED
    model.head.weight = nn.Parameter(model.embedding.weight.data[:50])
    assert count_parameters(model) == EXPECTED


def test_released_placeholders_count_with_their_shape() -> None:
    model = Tied()
    for parameter in model.parameters():
        parameter.data = torch.full((), float("nan")).expand(parameter.shape)
    assert count_parameters(model) == EXPECTED


def test_the_largest_layer_is_what_one_module_owns_itself() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))
    assert count_parameters(model) == (16 + 25 + 18, 25)


def test_a_model_larger_than_memory_is_counted_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 20, 1 << 20, bias=False) for _ in range(3)))
    assert count_parameters(model) == (3 << 40, 1 << 40)


@pytest.mark.parametrize("setup", [{}, {"gpus_per_node": 8, "nodes": 2, "additional_buffer_factor": 1.25}])
def test_live_estimates_are_the_cold_ones_of_the_counts(setup: dict[str, Any]) -> None:
    model = Tied()
    total, largest = EXPECTED
    assert estimate_zero1_live(model, **setup) == estimate_zero1(total, **setup)
    assert estimate_zero2_live(model, **setup) == estimate_zero2(total, **setup)
    assert estimate_zero3_live(model, **setup) == estimate_zero3(total, largest, **setup)


def test_a_model_without_countable_parameters_is_refused() -> None:
    with pytest.raises(PlanError, match="ReLU has no parameters"):
        count_parameters(nn.ReLU())
    with pytest.raises(PlanError, match="1.weight has no shape yet"):
        count_parameters(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))
