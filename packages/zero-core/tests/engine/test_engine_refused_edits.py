"""A refused edit leaves every rank with the same weights, and what all ranks wrote beside it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_core
from zero_comm import run_ranks
from zero_partition import EditRefusedError

SOAK = pytest.mark.soak
DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}


@dataclass
class Outcome:
    """The outcome on one rank: the refusal, and weights and masters before it, after it, and after another step."""

    text: str
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]
    trained: dict[str, torch.Tensor]


def alone_in_place(model: nn.Sequential) -> None:
    """The last rank writes one weight in place."""
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            model[1].weight.fill_(0.25)


def alone_beside_a_shared_one(model: nn.Sequential) -> None:
    """All ranks give the first weight another storage and write the second in place, then the last one writes alone."""
    model[0].weight.data = torch.full_like(model[0].weight, 0.5)
    with torch.no_grad():
        model[2].bias.fill_(0.125)
    if dist.get_rank() == dist.get_world_size() - 1:
        model[1].weight.data = torch.full_like(model[1].weight, 0.25)


def different_in_place(model: nn.Sequential) -> None:
    """Each rank writes other values in place, so no rank has the former ones."""
    with torch.no_grad():
        model[1].weight.fill_(float(2 + dist.get_rank()))


def different_storage(model: nn.Sequential) -> None:
    """Each rank gives a weight other values in another storage; the former ones are in the engine's."""
    model[1].weight.data = torch.full_like(model[1].weight, float(2 + dist.get_rank()))


def run(stage: int, dtype: str, write: Callable[[nn.Sequential], None]) -> Outcome:
    """Step, write, meet the refusal in the next step, and continue after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)).to(DTYPES[dtype])
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
        "steps_per_print": 0,
    }
    engine = zero_core.initialize(model=model, config=config)[0]

    def step(seed: int) -> None:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])
        engine.backward(engine(x).float().square().mean())
        engine.step()

    def weights() -> dict[str, torch.Tensor]:
        with engine.gathered(list(model.parameters())):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    step(0)
    before = weights()
    write(model)
    with pytest.raises(EditRefusedError) as refusal:
        step(1)
    engine.zero_grad()
    after = weights()
    masters = {name: engine.full_param(parameter).detach().clone() for name, parameter in model.named_parameters()}
    step(2)
    outcome = Outcome(str(refusal.value), before, after, masters, weights())
    engine.destroy()
    return outcome


def outcomes(stage: int, dtype: str, world_size: int, write: Callable[[nn.Sequential], None]) -> list[Outcome]:
    """Run on ranks, and check that all have the same weights and masters after the refusal and after training on."""
    found: list[Outcome] = run_ranks(run, world_size, stage, dtype, write)
    for other in found[1:]:
        for kind in ("after", "masters", "trained"):
            for name, value in getattr(found[0], kind).items():
                assert torch.equal(getattr(other, kind)[name], value), (kind, name)
    for name, value in found[0].after.items():
        assert torch.equal(found[0].masters[name].to(value.dtype), value), name
    return found


CASES = [
    pytest.param(stage, dtype, ranks, marks=[] if (stage, dtype, ranks) in ((0, "fp64", 2), (2, "bf16", 3)) else SOAK)
    for stage in (0, 1, 2)
    for dtype in DTYPES
    for ranks in (2, 3)
]


@pytest.mark.parametrize(("stage", "dtype", "ranks"), CASES)
@pytest.mark.parametrize("write", [alone_in_place, different_storage])
def test_a_refused_write_is_undone_on_every_rank(
    write: Callable[[nn.Sequential], None], stage: int, dtype: str, ranks: int
) -> None:
    for found in outcomes(stage, dtype, ranks, write):
        assert "parameter '1.weight'" in found.text and "former value on every rank" in found.text
        assert all(torch.equal(found.after[name], value) for name, value in found.before.items())


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=SOAK), pytest.param(2, marks=SOAK)])
def test_a_value_that_every_rank_has_overwritten_is_rank_0s_and_the_error_says_so(stage: int) -> None:
    for found in outcomes(stage, "bf16" if stage == 1 else "fp64", 2, different_in_place):
        assert "parameter '1.weight'" in found.text and "every rank has rank 0's" in found.text
        assert bool((found.after["1.weight"] == 2.0).all())


@pytest.mark.parametrize(("stage", "dtype", "ranks"), CASES)
def test_what_all_ranks_wrote_beside_a_refused_write_counts(stage: int, dtype: str, ranks: int) -> None:
    for found in outcomes(stage, dtype, ranks, alone_beside_a_shared_one):
        assert "parameter '1.weight'" in found.text
        assert bool((found.after["0.weight"] == 0.5).all()) and bool((found.after["2.bias"] == 0.125).all())
        assert torch.equal(found.after["1.weight"], found.before["1.weight"])
