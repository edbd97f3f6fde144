"""A budget refuses before anything is allocated, and says what needs what."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from zero_offload import BudgetError, HostBudget, OffloadedOptimizer
from zero_offload.limits import Limit


def small(**free: int) -> HostBudget:
    limits = {name: [Limit(f"the {name} of a test", number), Limit("plenty", 1 << 40)] for name, number in free.items()}
    return HostBudget(reserve_bytes=0, limits=limits)  # type: ignore[arg-type]


def test_what_fits_passes_and_what_does_not_is_refused_with_the_table() -> None:
    budget = small(memory=1000, disk=50)
    budget.need("masters", 600)
    budget.check()
    budget.need("ring buffers", 500)
    with pytest.raises(BudgetError, match="ring buffers") as caught:
        budget.check()
    table = caught.value.table
    assert [line.split()[-2] for line in table.splitlines()[:2]] == ["600", "500"]
    assert "allowed by the memory of a test" in table
    assert "short of 100 bytes" in table
    assert "tier=" in str(caught.value)


def test_paths_on_one_file_system_are_added_up(tmp_path: Path) -> None:
    budget = small(disk=150)
    budget.need("one", 100, "disk", path=str(tmp_path / "a"))
    budget.check()
    budget.need("two", 100, "disk", path=str(tmp_path / "b"))
    with pytest.raises(BudgetError, match="free some space"):
        budget.check()


def test_memory_kept_in_reserve_is_not_given_away() -> None:
    budget = HostBudget(reserve_bytes=900, limits={"memory": [Limit("test", 1000)]})
    budget.need("thing", 101)
    with pytest.raises(BudgetError, match="kept free"):
        budget.check()


def test_the_default_reserve_leaves_most_of_a_small_limit() -> None:
    small, large = (HostBudget(limits={"memory": [Limit("test", free << 20)]}) for free in (100, 4096))
    assert small.free("memory").free == 75 << 20
    assert large.free("memory").free == (4096 - 256) << 20


def test_the_limits_of_this_machine_are_found(tmp_path: Path) -> None:
    budget = HostBudget()
    budget.need("memory", 1)
    budget.need("locked", 1, "locked")
    budget.need("shared", 1, "shared")
    budget.need("files", 1, "disk", path=str(tmp_path))
    budget.check()
    assert len(budget.table().splitlines()) == 12


def test_wrong_needs_are_refused() -> None:
    budget = HostBudget()
    with pytest.raises(ValueError, match="resource: expected one of memory"):
        budget.need("x", 1, "paper")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected 0 or more bytes"):
        budget.need("x", -1)
    with pytest.raises(ValueError, match="a path belongs to disk"):
        budget.need("x", 1, "disk")


def test_an_optimizer_that_does_not_fit_allocates_nothing_and_says_so(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(1000))
    with pytest.raises(BudgetError, match="masters and optimizer states +7.81 KiB \\(8000 bytes\\)"):
        OffloadedOptimizer([weight], budget=small(memory=7999))
    OffloadedOptimizer([weight], budget=small(memory=8000)).close()
    with pytest.raises(BudgetError, match="disk of"):
        OffloadedOptimizer([weight], tier="nvme", path=tmp_path / "swap", budget=small(disk=7999))
    assert not (tmp_path / "swap").exists()


def test_what_does_not_fit_the_host_goes_to_files_with_a_warning(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(100_000))
    options = {"tier": "auto", "path": tmp_path / "swap", "sub_group_size": 4096, "buffer_count": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with OffloadedOptimizer([weight], budget=small(memory=800_000), **options) as optimizer:
            assert (optimizer.memory()["states"], optimizer.memory()["nvme"]) == (800_000, 0)
    with pytest.warns(UserWarning, match=r"(?s)go to files: this does not fit here:.*short of 1 bytes"):
        optimizer = OffloadedOptimizer([weight], budget=small(memory=799_999), **options)
    with optimizer:
        assert (optimizer.memory()["states"], optimizer.memory()["nvme"]) == (0, 800_000)
    with pytest.warns(UserWarning, match="go to files"), pytest.raises(BudgetError, match="ring buffers"):
        OffloadedOptimizer([weight], budget=small(memory=65_535), **options)


def test_a_copy_of_a_budget_leaves_the_first_as_it_was() -> None:
    budget = small(memory=100)
    budget.need("one", 60)
    other = budget.copy()
    other.need("two", 60)
    with pytest.raises(BudgetError):
        other.check()
    budget.check()


def test_processes_with_the_same_needs_share_what_they_have_in_common() -> None:
    read: list[str] = []
    limits = {"memory": [Limit("the host", 1000), Limit("RLIMIT_DATA", 400, own=True)], "disk": [Limit("disk", 90)]}
    budget = HostBudget(
        reserve_bytes=100,
        limits=limits,  # type: ignore[arg-type]
        processes=3,
        barrier=lambda: read.append("all have read"),
    )
    budget.need("masters", 300)
    budget.check()
    assert read == ["all have read"]
    assert budget.free("disk", path="/").free == 30
    budget.need("one more byte", 1)
    with pytest.raises(
        BudgetError, match="the host less 100 bytes kept free, shared by 3 processes .*short of 1 bytes"
    ):
        budget.check()
    assert len(read) == 2
    budget = HostBudget(reserve_bytes=100, limits=limits, processes=2)  # type: ignore[arg-type]
    assert budget.free("memory").source == "RLIMIT_DATA less 100 bytes kept free"
    assert budget.free("memory").free == 300
    with pytest.raises(ValueError, match="processes: expected 1 or more, got 0"):
        HostBudget(processes=0)
