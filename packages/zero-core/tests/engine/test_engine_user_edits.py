"""What user code writes into weights counts as in one process, or is refused by name on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import user_edit_cases as cases
import user_edit_copies as copies

from zero_comm import run_ranks

TOLERANCE = {"float64": 1e-12, "bfloat16": 2e-6}
SOAK = pytest.mark.soak
EVERY = list(product((0, 1, 2, 3), ("none", "cpu", "nvme"), ("float64", "bfloat16"), (1, 2, 3)))
REPRESENTATIVES = [(0, "none", "bfloat16", 2), (1, "cpu", "bfloat16", 1), (2, "nvme", "bfloat16", 2)]
REPRESENTATIVES += [(3, "nvme", "bfloat16", 2), (3, "none", "float64", 3)]


@pytest.mark.parametrize(
    ("stage", "tier", "dtype", "world_size"),
    [pytest.param(*case, marks=() if case in REPRESENTATIVES else SOAK) for case in EVERY],
)
def test_edits_of_one_run_follow_one_process(
    stage: int, tier: str, dtype: str, world_size: int, tmp_path: Path
) -> None:
    for found in run_ranks(cases.deviation_together, world_size, stage, tier, dtype, str(tmp_path), timeout=300):
        assert found <= TOLERANCE[dtype]


@SOAK
@pytest.mark.parametrize(("stage", "tier", "dtype", "world_size"), EVERY)
def test_each_edit_follows_one_process(stage: int, tier: str, dtype: str, world_size: int, tmp_path: Path) -> None:
    for found in run_ranks(cases.deviations, world_size, stage, tier, dtype, str(tmp_path), timeout=300):
        wrong = {case: value for case, value in found.items() if not value <= TOLERANCE[dtype]}
        assert not wrong, wrong


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=SOAK), pytest.param(2, marks=SOAK), 3])
def test_edits_that_cannot_count_are_refused_by_name_on_every_rank(stage: int, tmp_path: Path) -> None:
    for found in run_ranks(cases.refusals, 2, stage, "none", str(tmp_path), timeout=120):
        for case, text in found.items():
            assert "parameter '" in text and "but weights changed" not in text, (case, text)


def some_of(often: list[tuple[Any, ...]], *axes: Iterable[Any]) -> list[Any]:
    """The product of ``axes``, of which those ``often`` are no soak."""
    return [pytest.param(*case, marks=() if case in often else SOAK) for case in product(*axes)]


TIERS = ("none", "cpu", "nvme")


@pytest.mark.parametrize(
    ("stage", "world_size", "tier"), some_of([(0, 2, "none"), (3, 2, "none")], range(4), (1, 2, 3), TIERS)
)
def test_a_router_that_forward_casts_to_float32_trains(stage: int, world_size: int, tier: str, tmp_path: Path) -> None:
    for facts in run_ranks(copies.routers, world_size, stage, tier, str(tmp_path)):
        assert facts["moved"] > 0.01 and facts["distance"] <= TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    ("stage", "tier"), some_of([(0, "none"), (1, "cpu"), (2, "nvme"), (3, "cpu")], range(4), TIERS)
)
def test_a_master_keeps_its_digits_where_a_step_skips_it_after_an_edit(stage: int, tier: str, tmp_path: Path) -> None:
    assert run_ranks(copies.skips_a_parameter_after_an_edit, 2, stage, tier, str(tmp_path)) == [[True] * 4] * 2


@pytest.mark.parametrize(
    ("stage", "world_size", "tier"),
    some_of(
        [(0, 1, "none"), (1, 3, "none"), (2, 2, "cpu"), (3, 2, "none"), (3, 3, "nvme")], range(4), (1, 2, 3), TIERS
    ),
)
def test_copies_have_values_and_pickles_and_loads_of_released_parameters_are_refused(
    stage: int, world_size: int, tier: str, tmp_path: Path
) -> None:
    releases = stage == 3 and (world_size > 1 or tier == "nvme")
    for rank, facts in enumerate(run_ranks(copies.copies, world_size, stage, tier, str(tmp_path))):
        assert facts["copy"] and facts["plain"] and facts["trains"] and facts["average"]
        assert rank or facts["inside"]
        for name in ("pickle", "load"):
            assert "' is released" in facts[name] if releases else facts[name] == "done"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_written_after_its_use_is_refused_in_backward_as_in_torch(stage: int, tmp_path: Path) -> None:
    for text in run_ranks(copies.writes_after_use, 2, stage, str(tmp_path)):
        assert ("modified by an inplace operation" if stage == 0 else "'first.weight' was changed") in text


@pytest.mark.parametrize(
    ("stage", "tier", "world_size", "dtype"),
    some_of(
        [(0, "none", 2, "bfloat16"), (3, "nvme", 2, "bfloat16"), (2, "cpu", 3, "float64")],
        *(range(4), TIERS, (1, 2, 3), ("float64", "bfloat16")),
    ),
)
def test_a_checkpoint_holds_what_was_edited_before_it(
    stage: int, tier: str, world_size: int, dtype: str, tmp_path: Path
) -> None:
    assert all(run_ranks(copies.saves_after_an_edit, world_size, stage, tier, dtype, str(tmp_path)))


@pytest.mark.parametrize(
    ("stage", "world_size", "tier"),
    some_of([(0, 2, "none"), (1, 3, "none"), (2, 1, "cpu"), (3, 2, "nvme")], range(4), (1, 2, 3), TIERS),
)
def test_parameters_over_shared_memory_are_refused_by_both_names(
    stage: int, world_size: int, tier: str, tmp_path: Path
) -> None:
    for found in run_ranks(copies.ties_of, world_size, stage, tier, str(tmp_path)):
        for kind, other in {"data": "second.weight", "transposed": "second.weight", "row": "second.bias"}.items():
            assert "parameter 'first.weight'" in found[kind] and f"parameter '{other}'" in found[kind]
        assert "'first.weight'" in found["buffer"] and "buffer 'kept'" in found["buffer"]
        assert found["columns"] == "trains" and found["buffers"] == "tied"


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SOAK), 2, pytest.param(3, marks=SOAK)])
def test_a_save_of_a_model_with_another_parameter_object_is_refused(stage: int, tmp_path: Path) -> None:
    for text in run_ranks(copies.exchanges_a_parameter, 2, stage, str(tmp_path)):
        assert "parameter 'first.weight'" in text


@pytest.mark.parametrize(
    ("stage", "dora", "world_size", "tier"),
    some_of([(3, False, 2, "none")], range(4), (False, True), (1, 2, 3), TIERS),
)
def test_adapters_merge_and_unmerge_as_in_one_process(
    stage: int, dora: bool, world_size: int, tier: str, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    for facts in run_ranks(copies.adapters, world_size, stage, dora, tier, str(tmp_path)):
        assert facts["merged"] <= 1e-12 and facts["apart"] <= 1e-12
