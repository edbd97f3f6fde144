"""`deterministic.across_world_sizes`: the same bits at every number of ranks."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import build, outcome, start, train
from virtual_rank_cases import (
    BF16_MASTERS,
    MICRO,
    SAMPLES,
    TIERS,
    VIRTUAL,
    merged,
    product,
    refusals,
    reloaded,
    resumed,
)

from zero_ckpt import open_checkpoint
from zero_ckpt.comparing import diff
from zero_comm import run_ranks
from zero_core.data_loader import rank_loader

CASES = [
    (0, "fp32", "device"),
    (1, "bf16", "device"),
    (2, "fp32", "device"),
    (3, "bf16", "device"),
    (3, "fp32", "host"),
    (2, "bf16", "nvme"),
    (1, "bf16 states", "device"),
    (3, "bf16 masters", "device"),
]


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [key for key in ours if ours[key] != theirs[key]]


def test_losses_norms_weights_and_moments_are_bitwise_equal_at_one_two_and_four_ranks(tmp_path: Path) -> None:
    found = {n: run_ranks(product, n, CASES, 4, str(tmp_path)) for n in (1, 2, 4)}
    for case in map(str, CASES):
        alone = merged([answer[case] for answer in found[1]])
        for ranks in (2, 4):
            assert not differences(alone, merged([answer[case] for answer in found[ranks]])), (case, ranks)


LOADED = [(0, "bf16"), (1, "bf16 masters"), (2, "bf16 states"), (3, "bf16 masters"), (3, "fp32")]


@pytest.mark.parametrize(
    ("cases", "sizes"), [([LOADED[3]], (2,)), pytest.param(LOADED, (1, 2, 4), marks=pytest.mark.soak)]
)
def test_a_state_that_the_optimizer_loads_changes_no_bits_at_any_number_of_ranks(
    cases: list[tuple[int, str]], sizes: tuple[int, ...]
) -> None:
    alone = run_ranks(partial(reloaded, loads=False), 1, cases, 3)[0]
    found = {n: run_ranks(reloaded, n, cases, 3) for n in sizes}
    for case in map(str, cases):
        for ranks, answers in found.items():
            assert not differences(alone[case], merged([answer[case] for answer in answers])), (case, ranks)


def made_with(virtual: int) -> str:
    return outcome(lambda: start(1, deterministic={"across_world_sizes": virtual}))


@pytest.mark.parametrize(("ranks", "virtual", "said"), [(1, 6, "a power of two"), (2, 1, "2"), (3, 4, "3")])
def test_numbers_of_ranks_and_virtual_ranks_that_do_not_fit_are_refused_by_key(
    ranks: int, virtual: int, said: str
) -> None:
    for text in run_ranks(made_with, ranks, virtual):
        assert text.startswith(("ConfigError", "UsageError")) and "across_world_sizes" in text and said in text, text


OTHERS = [(0, "device"), *((stage, tier) for stage in (1, 2, 3) for tier in TIERS if (stage, tier) != (3, "nvme"))]


@pytest.mark.parametrize(
    ("stage", "tier"), [(3, "nvme"), *(pytest.param(*case, marks=pytest.mark.soak) for case in OTHERS)]
)
def test_a_run_that_resumes_at_another_number_of_ranks_goes_on_bitwise(tmp_path: Path, stage: int, tier: str) -> None:
    several, alone = tmp_path / "several", tmp_path / "alone"
    parts = [merged(run_ranks(resumed, n, str(several), stage, tier, [2, 1, 1], k)) for k, n in enumerate((2, 4, 1))]
    whole = merged(run_ranks(resumed, 1, str(alone), stage, tier, [4], 0))
    seen = {key: value for part in parts for key, value in part.items()}
    assert not differences(whole, seen)
    found = diff(open_checkpoint(alone / "0"), open_checkpoint(several / "2"))
    assert found.equal > 10 and not (found.only_first or found.only_second or found.reshaped or found.changed)


def test_what_would_depend_on_the_number_of_ranks_is_refused_by_name_on_every_rank() -> None:
    expected = {
        "plain": "engine.backward(loss)",
        "twice": "expected one backward pass for each micro-batch",
        "past": "not engine.module(batch)",
        "boundary": "expected a step after 2 micro-batches on each of 2 ranks, got one after 1",
        "zero_grad": "zero_grad() only between steps",
        "clip": "expected clip_grad_norm_ between steps",
        "save": "expected save_checkpoint between steps",
        "buffer": "forward wrote the buffer 'seen'",
        "cache": "none",
        "threads": "1 on rank 0 and 2 on rank 1",
        "lamb": "optimizer.type: expected another optimizer",
        "size": f"expected {MICRO * VIRTUAL}",
    }
    for seen in run_ranks(refusals, 2):
        for case, text in expected.items():
            assert text in seen[case], (case, seen[case])


@pytest.mark.parametrize("drop_last", (False, True))
@pytest.mark.parametrize("size", (61, SAMPLES))
def test_a_virtual_rank_gets_the_same_samples_at_any_number_of_ranks(size: int, drop_last: bool) -> None:
    def epochs(ranks: int) -> list[list[list[int]]]:
        """Two epochs' batches, in the order of steps and virtual ranks."""
        loaders = [
            rank_loader(
                list(range(size)),
                MICRO,
                rank=rank,
                ranks=ranks,
                device=torch.device("cpu"),
                drop_last=drop_last,
                virtual_ranks=VIRTUAL,
            )
            for rank in range(ranks)
        ]
        found = [[batch.tolist() for row in zip(*loaders, strict=True) for batch in row] for _ in range(2)]
        assert [len(epoch) for epoch in found] == [ranks * len(loaders[0])] * 2
        return found

    alone = epochs(1)
    assert alone[0] != alone[1] and epochs(2) == alone and epochs(VIRTUAL) == alone


@pytest.mark.soak
@pytest.mark.parametrize("tier", TIERS)
def test_every_stage_dtype_and_tier_is_bitwise_equal_at_one_to_eight_ranks(tmp_path: Path, tier: str) -> None:
    stages = {"device": (0, 1, 2, 3), "host": (1, 2, 3), "nvme": (1, 2, 3), "all nvme": (3,)}[tier]
    cases = [(stage, dtype, tier) for stage in stages for dtype in ("fp32", "bf16", "fp16", "fp64")]
    cases += [(stage, dtype, tier) for stage in stages if stage for dtype in BF16_MASTERS]
    found = {n: run_ranks(product, n, cases, 7, str(tmp_path), 8, timeout=600.0) for n in (1, 2, 4, 8)}
    for case in map(str, cases):
        alone = merged([answer[case] for answer in found[1]])
        for ranks in (2, 4, 8):
            assert not differences(alone, merged([answer[case] for answer in found[ranks]])), (case, ranks)


def test_a_buffer_that_user_code_removes_does_not_end_training(alone: None) -> None:
    model = build()
    model.register_buffer("seen", torch.zeros(1))
    engine = start(2, model, deterministic={"across_world_sizes": 2})
    train(engine, 0, 1)
    del engine.module.seen
    losses = train(engine, 1, 3)
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
