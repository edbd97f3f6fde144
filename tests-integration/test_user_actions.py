"""What user code does to parameters, gradients and the optimizer counts as in plain torch, or is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import action_refusals
import pytest
import torch
import user_actions
from action_cases import ALL_ACTIONS, Case

from zero_comm import CommError, run_ranks
from zero_partition import PartitionError

KEPT = (10, 35, 82, 97, 122, 145, 100240, 100444, 1_000_026, 1_000_050)
"""Seeds whose sequences were wrong once, on two ranks."""
CHOSEN = {1: (31, 45, 48, 51, 1_000_034), 2: (0, 1, 2, 4, 1_000_008), 3: (7, 12, 39, 50, 1_000_040, 1_005_052)}
"""By world size, seeds that have every stage, and a tier, among them."""
IN_16_BITS = {1: (47, 600245, 100978, 1_000_022), 2: (2, 42, 501070, 1_000_040), 3: (45, 1_000_008)}
CHUNK = 50


def verdicts(seeds: Sequence[int], world_size: int, dtype: torch.dtype = torch.float64) -> list[user_actions.Verdict]:
    """How the sequences of ``seeds`` ended, the same on every rank; stops at the first that is wrong."""
    return run_ranks(user_actions.run_cases, world_size, seeds, dtype, timeout=300)[0]


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_random_sequences_end_as_in_plain_torch_or_are_refused(world_size: int) -> None:
    cases = [Case.of(seed) for seed in CHOSEN[world_size]]
    assert {case.stage for case in cases} == {0, 1, 2, 3} and any(case.on_a_tier for case in cases)
    wrong = [v for v in verdicts(CHOSEN[world_size], world_size) if v.wrong]
    wrong += [v for v in verdicts(IN_16_BITS[world_size], world_size, torch.bfloat16) if v.wrong]
    assert not wrong, wrong


def test_sequences_that_were_wrong_once() -> None:
    wrong = [v for v in verdicts(KEPT, 2) if v.wrong]
    assert not wrong, wrong


def test_every_refusal_says_what_to_write_and_is_documented() -> None:
    assert action_refusals.undocumented() == []


@pytest.mark.parametrize(
    ("error", "text"),
    (
        (RuntimeError, action_refusals.CLIPPED.text),
        (PartitionError, action_refusals.WRITTEN_RELEASED.text),
        (PartitionError, action_refusals.CLIPPED.text.replace("{name}", "unit0")),
        (PartitionError, action_refusals.CLIPPED.text.replace(action_refusals.CLIPPED.told, "")),
        (CommError, "Connection closed by peer"),
    ),
)
def test_only_a_refusal_that_is_written_out_and_names_a_parameter_counts(error: type[Exception], text: str) -> None:
    assert action_refusals.refusal_of(error(text.replace("{name}", "head.bias")), {"head.bias"}) is None
    counts = PartitionError(action_refusals.CLIPPED.text.replace("{name}", "head.bias"))
    assert action_refusals.refusal_of(counts, {"head.bias"}) is action_refusals.CLIPPED


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_ten_thousand_sequences(dtype: torch.dtype, world_size: int) -> None:
    count = {1: 3000, 2: 4000, 3: 3000}[world_size]
    refused: Counter[str] = Counter()
    done = 0
    wrong = []
    for first in range(0, count, CHUNK):
        seeds: Sequence[int] = range(ALL_ACTIONS + first, ALL_ACTIONS + first + CHUNK)
        while seeds:
            ended = verdicts(seeds, world_size, dtype)
            done += len(ended)
            refused.update(kind for v in ended for kind in v.refused)
            wrong += [v for v in ended if v.wrong]
            seeds = seeds[len(ended) :]
    print(f"{world_size} ranks: {done} sequences, {len(wrong)} wrong; refused: {dict(refused)}")
    assert not wrong, wrong[:10]
