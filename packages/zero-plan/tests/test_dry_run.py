"""The dry run of the engine against real runs of it, to the byte."""

from __future__ import annotations

from collections.abc import Iterable

import dry_models
import pytest
import torch
from dry_models import Case, Measured, decoder, tied_decoder

from zero_comm import run_ranks
from zero_plan import PlanError, RankPlan, plan

BF16 = (("bf16", {"enabled": True}),)
HOST = {"device": "cpu"}
OPTIMIZER_ON_HOST = (("offload_optimizer", HOST),)
PARAMETERS_ON_HOST = (("offload_param", HOST),)
BOTH_ON_HOST = (*OPTIMIZER_ON_HOST, *PARAMETERS_ON_HOST)
SOAK = pytest.mark.soak


def check(cases: list[Case], world_size: int, ranks: Iterable[int] | None = None) -> None:
    by_rank: list[list[Measured]] = run_ranks(dry_models.train, world_size, cases)
    for number, case in enumerate(cases):
        found = plan(case.model, case.config(), batch=dry_models.tokens(), world_size=world_size, ranks=ranks)
        for planned in found.ranks:
            assert_equal(case, planned, by_rank[planned.rank][number])


def assert_equal(case: Case, planned: RankPlan, measured: Measured) -> None:
    assert sorted(map(tuple, planned.held)) == sorted(measured.held), (case, planned.rank)
    sent = {row[:2]: row[2:] for row in measured.sent}
    assert {tuple(row[:2]): tuple(row[2:]) for row in planned.sent} == sent, (case, planned.rank)


@pytest.mark.parametrize(
    ("world_size", "rank", "cases"),
    [
        (1, 0, [Case(stage=3)]),
        (2, 1, [Case(stage=0), Case(tied_decoder, stage=2, accumulation=3, settings=BF16, zero=OPTIMIZER_ON_HOST)]),
        (3, 2, [Case(stage=1, accumulation=3, settings=BF16), Case(tied_decoder, stage=3)]),
        (4, 3, [Case(stage=3, settings=BF16, zero=BOTH_ON_HOST)]),
    ],
)
def test_states_and_what_a_step_sends_are_those_of_a_real_run_to_the_byte(
    world_size: int, rank: int, cases: list[Case]
) -> None:
    check(cases, world_size, [rank])


def test_who_cannot_be_planned_is_told_the_line() -> None:
    with pytest.raises(PlanError, match=r"asks for one \(.*dry_models.py, line \d+\)"):
        plan(dry_models.Branching, Case().config(), batch=torch.zeros(2, 4), world_size=2)
    with pytest.raises(PlanError, match='offload_optimizer.device: expected "none" or "cpu", .* got "nvme"'):
        offloaded = Case(zero=(("offload_optimizer", {"device": "nvme", "nvme_path": "nowhere"}),))
        plan(decoder, offloaded.config(), batch=dry_models.tokens(), world_size=2)
    with pytest.raises(PlanError, match="ranks: expected ranks from 0 to 1, got 2"):
        plan(decoder, Case().config(), batch=dry_models.tokens(), world_size=2, ranks=[2])
    without = {key: value for key, value in Case().config().items() if key != "optimizer"}
    with pytest.raises(PlanError, match='has to name an "optimizer"'):
        plan(decoder, without, batch=dry_models.tokens(), world_size=2)
    assert not torch.distributed.is_initialized()


@SOAK
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("stage", range(4))
def test_states_and_sends_match_for_every_stage_accumulation_and_dtype(stage: int, world_size: int) -> None:
    dtypes = ((), BF16, (("fp16", {"enabled": True}),)) if stage else ((), (("bf16", {"enabled": False}),))
    zero = ((), (("stage3_prefetch_bucket_size", 500),), (("unit_max_numel", 3000),))
    cases = [
        Case(model, stage, accumulation, dtype, options)
        for model in (decoder, tied_decoder)
        for accumulation in (1, 3)
        for dtype in dtypes
        for options in zero
    ]
    check(cases, world_size, range(world_size))


@SOAK
@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("model", (decoder, tied_decoder))
def test_states_and_sends_match_with_offload_to_the_host(model: object, world_size: int) -> None:
    tiers = [(stage, OPTIMIZER_ON_HOST) for stage in (1, 2, 3)] + [(3, PARAMETERS_ON_HOST), (3, BOTH_ON_HOST)]
    cases = [
        Case(model, stage, accumulation, dtype, zero)
        for stage, zero in tiers
        for accumulation in (1, 3)
        for dtype in ((), BF16)
    ]
    check(cases, world_size, range(world_size))
