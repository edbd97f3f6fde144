"""What a plan says of saving a checkpoint is what a real save does."""

from __future__ import annotations

import pytest
from dry_models import Case, decoder, tied_decoder, tokens
from saved_models import load, save

from zero_comm import run_ranks
from zero_plan import Peak, Plan, plan

BF16 = (("bf16", {"enabled": True}),)
BEHIND = ("checkpoint", {"writer": {"decoupled": True}})
HOST, NVME = {"device": "cpu"}, {"device": "nvme"}
OPTIMIZER_ON_HOST = (("offload_optimizer", HOST),)
BOTH_ON_HOST = (("offload_param", HOST), ("offload_optimizer", HOST))
BOTH_ON_NVME = (("offload_param", NVME), ("offload_optimizer", NVME))


def check(cases: list[Case], world_size: int, folder: object) -> None:
    real = run_ranks(save, world_size, cases, str(folder))
    for number, case in enumerate(cases):
        found = planned(case, world_size)
        messages = max(measured[number].message_nbytes for measured in real)
        assert max(r.saved.message_nbytes for r in found.ranks if r.saved) == pytest.approx(messages, rel=0.01)
        for rank in found.ranks:
            assert rank.saved is not None
            measured = real[rank.rank][number]
            assert dict(rank.saved.files) == measured.files, (case, rank.rank)
            assert highest(rank.saved.peaks) == measured.peaks, (case, rank.rank)


def check_loads(cases: list[Case], saved_by: int, world_size: int, folder: object) -> None:
    run_ranks(save, saved_by, cases, str(folder))
    real = run_ranks(load, world_size, cases, str(folder))
    for number, case in enumerate(cases):
        for rank in planned(case, world_size, saved_by=saved_by).ranks:
            measured, found = real[rank.rank][number], rank.loaded
            assert found is not None and found.saved_by == saved_by
            assert (found.read, found.written) == (measured.read, measured.written), (case, rank.rank)
            assert highest(found.peaks) == highest(measured.peaks), (case, rank.rank)
            assert (found.scratch_nbytes > 0) == (saved_by < world_size)


def highest(peaks: tuple[Peak, ...]) -> dict[str, int]:
    return {peak.tier: peak.nbytes for peak in peaks}


def planned(case: Case, world_size: int, *, saved_by: int | None = None) -> Plan:
    asked = {"batch": tokens(), "world_size": world_size, "ranks": range(world_size), "saved_by": saved_by}
    return plan(case.model, case.config(), checkpoint=True, **asked)


@pytest.mark.parametrize("world_size", (1, 2))
def test_files_and_live_storages_of_a_save_are_those_of_a_real_one_to_the_byte(
    world_size: int, tmp_path: object
) -> None:
    cases = [Case(stage=stage, settings=dtype) for stage in range(4) for dtype in ((), BF16)]
    cases += [Case(stage=2, settings=BF16, zero=OPTIMIZER_ON_HOST), Case(tied_decoder, 3, 3, BF16, BOTH_ON_HOST)]
    cases += [Case(decoder, 3, settings=dtype, zero=BOTH_ON_NVME) for dtype in ((), BF16)]
    check(cases, world_size, tmp_path)


@pytest.mark.parametrize("world_size", (1, 2))
def test_the_copies_and_files_of_a_save_behind_training_are_those_of_a_real_one_to_the_byte(
    world_size: int, tmp_path: object
) -> None:
    cases = [Case(stage=0), Case(stage=1, settings=BF16), Case(tied_decoder, 3, settings=BF16)]
    cases += [Case(stage=2, settings=BF16, zero=OPTIMIZER_ON_HOST), Case(decoder, 3, 3, BF16, BOTH_ON_HOST)]
    cases += [Case(decoder, 3, settings=BF16, zero=BOTH_ON_NVME)]
    cases = [case._replace(settings=(*case.settings, BEHIND)) for case in cases]
    real = run_ranks(save, world_size, cases, str(tmp_path))
    for number, case in enumerate(cases):
        for rank in planned(case, world_size).ranks:
            measured = real[rank.rank][number]
            assert rank.saved is not None
            assert rank.saved.copied_nbytes == measured.copied_nbytes > 0, (case, rank.rank)
            assert dict(rank.saved.files) == measured.files, (case, rank.rank)
            assert highest(rank.saved.peaks) == measured.peaks, (case, rank.rank)


@pytest.mark.parametrize(("saved_by", "world_size"), ((1, 1), (2, 2), (2, 1), (1, 2)))
def test_reads_and_live_storages_of_a_load_are_those_of_a_real_one_to_the_byte(
    saved_by: int, world_size: int, tmp_path: object
) -> None:
    cases = [Case(stage=0), Case(stage=3), Case(tied_decoder, 1, settings=BF16), Case(stage=3, settings=BF16)]
    cases += [Case(stage=2, settings=BF16, zero=OPTIMIZER_ON_HOST), Case(tied_decoder, 3, 3, BF16, BOTH_ON_HOST)]
    cases += [Case(decoder, 3, settings=BF16, zero=BOTH_ON_NVME)]
    check_loads(cases, saved_by, world_size, tmp_path)


def test_a_save_writes_what_no_tier_has_in_files_and_a_plan_keeps_it_as_plain_data() -> None:
    found = planned(Case(stage=3, settings=BF16, zero=BOTH_ON_NVME), 1)
    [rank] = found.ranks
    assert rank.saved is not None and rank.saved.linked
    sizes = dict(rank.saved.files)
    assert rank.saved.written == sum(sizes.values()) - sum(sizes[name] for name in rank.saved.linked)
    assert rank.loaded is not None
    assert {peak.phase for peak in rank.saved.peaks} == {"save"}
    assert {peak.phase for peak in rank.loaded.peaks} == {"load"}
    assert Plan.from_dict(found.as_dict()) == found


def test_a_plan_without_a_checkpoint_says_nothing_of_one() -> None:
    case = Case()
    [rank] = plan(case.model, case.config(), batch=tokens(), world_size=1).ranks
    assert rank.saved is None and rank.loaded is None
