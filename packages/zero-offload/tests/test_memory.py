"""What is held is what is counted, to the byte."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from zero_offload import HostBudget, OffloadedOptimizer
from zero_offload._memory import PAGE, HostBlock, page_rounded
from zero_offload.limits import Limit
from zero_offload.swap_paths import SwapPaths

NUMELS = (10_001, 3, 70_000, 1)
NOTHING = {"device": 0, "gradients": 0, "nvme": 0, "ring": 0, "staging": 0, "states": 0}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(n, dtype=dtype)) for n in NUMELS]


def step(params: list[nn.Parameter], optimizer: OffloadedOptimizer) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


def needs(budget: HostBudget) -> dict[str, int]:
    return {need.resource: need.nbytes for need in budget.needs if need.purpose != "gradients"}


@pytest.mark.parametrize(
    ("dtype", "name", "bytes_per_element"),
    [
        (torch.bfloat16, "AdamW", 12),
        (torch.float16, "SGD", 4),
        (torch.float32, "AdamW", 8),
        (torch.float64, "Adagrad", 8),
    ],
)
def test_the_host_tier_holds_masters_and_states_and_not_a_byte_more(
    dtype: torch.dtype, name: str, bytes_per_element: int
) -> None:
    params = parameters(dtype)
    budget = HostBudget()
    with OffloadedOptimizer(params, name, lr=0.1, budget=budget) as optimizer:
        want = sum(NUMELS) * bytes_per_element
        assert optimizer.memory() == optimizer.plan == {**NOTHING, "states": want}
        assert needs(budget) == {"memory": want}
        blocks = [o for o in gc.get_objects() if type(o) is HostBlock and o.nbytes == want]
        assert sum(block.tensor.untyped_storage().nbytes() for block in blocks) == want
        step(params, optimizer)
        assert not optimizer.state


def test_offloaded_gradients_are_counted() -> None:
    params = parameters(torch.bfloat16)
    with OffloadedOptimizer(params, lr=0.1, gradients="host") as optimizer:
        assert optimizer.memory()["gradients"] == 2 * sum(NUMELS)


@pytest.mark.parametrize("buffer_count", [1, 2, 5])
def test_the_nvme_tier_holds_its_ring_and_the_files_hold_the_rest(tmp_path: Path, buffer_count: int) -> None:
    params = parameters(torch.bfloat16)
    budget = HostBudget()
    with OffloadedOptimizer(
        params, lr=0.1, tier="nvme", path=tmp_path, sub_group_size=8192, buffer_count=buffer_count, budget=budget
    ) as optimizer:
        # The fullest slice holds 1809 elements of the first tensor, the 3 of the second and 4096 of the third: each
        # tensor of each kind in whole pages. No other slice needs more than two whole grains.
        largest = 3 * max(
            page_rounded(4 * 1809) + page_rounded(12) + page_rounded(4 * 4096),
            page_rounded(4 * 8192),
        )
        want = buffer_count * largest
        stored = 12 * sum(NUMELS)
        assert optimizer.memory() == optimizer.plan == {**NOTHING, "ring": want, "nvme": stored}
        assert needs(budget) == {"memory": want, "disk": stored}
        step(params, optimizer)
        optimizer.flush()
        assert optimizer.bytes_written() == stored
        step(params, optimizer)
        optimizer.flush()
        assert optimizer.bytes_written() == 2 * stored
        assert optimizer.memory() == optimizer.plan
        on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert stored <= on_disk <= stored + (len(NUMELS) * 3 + 2) * PAGE


def test_only_slices_with_a_gradient_are_touched(tmp_path: Path) -> None:
    params = parameters(torch.bfloat16)
    with OffloadedOptimizer(params, lr=0.1, tier="nvme", path=tmp_path, sub_group_size=70_000) as optimizer:
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        optimizer.flush()
        assert optimizer.bytes_written() < 12 * 70_001


def test_needs_of_striped_paths_are_shares_of_the_whole(tmp_path: Path) -> None:
    limits = {"disk": [Limit("test", 12 * 1000)]}
    budget = HostBudget(limits=limits)  # type: ignore[arg-type]
    weight = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    paths = SwapPaths((str(tmp_path / "a"), str(tmp_path / "b")), (3.0, 1.0))
    with OffloadedOptimizer([weight], tier="nvme", path=paths, budget=budget):
        assert [need.nbytes for need in budget.needs if need.resource == "disk"] == [9000, 3000]


@pytest.mark.parametrize("ratio", [0.0, 0.123, 0.5, 0.999, 1.0])
def test_the_ratio_holds_to_the_element(tmp_path: Path, ratio: float) -> None:
    params = parameters(torch.bfloat16)
    options = {"tier": "nvme", "path": tmp_path, "sub_group_size": 8192, "ratio": ratio}
    with OffloadedOptimizer(params, lr=0.1, **options) as optimizer:
        step(params, optimizer)
        in_files = round(sum(NUMELS) * ratio)
        assert optimizer.memory() == optimizer.plan
        assert (optimizer.memory()["nvme"], optimizer.memory()["states"]) == (
            12 * in_files,
            12 * (sum(NUMELS) - in_files),
        )
        optimizer.flush()
        assert optimizer.bytes_written() == 12 * in_files
    with OffloadedOptimizer(parameters(torch.bfloat16), lr=0.1, sub_group_size=8192, ratio=ratio) as optimizer:
        assert optimizer.memory() == optimizer.plan
        held = optimizer.memory()
        assert (held["states"], held["device"]) == (12 * in_files, 12 * (sum(NUMELS) - in_files))
