from __future__ import annotations

import pytest
import torch

from zero_sequence import SequenceError, tokens_per_tile


@pytest.mark.parametrize(
    ("dtype", "bytes_per_logit"),
    ((torch.bfloat16, 6), (torch.float16, 6), (torch.float32, 8), (torch.float64, 16)),
)
def test_logits_and_their_copy_fill_the_budget(dtype: torch.dtype, bytes_per_logit: int) -> None:
    assert tokens_per_tile(bytes_per_logit * 1000 * 7, 1000, dtype) == 7
    assert tokens_per_tile(bytes_per_logit * 1000 * 7 - 1, 1000, dtype) == 6


def test_one_token_is_the_least() -> None:
    assert tokens_per_tile(1, 128_256, torch.bfloat16) == 1


@pytest.mark.parametrize(("budget", "classes"), ((0, 10), (10, 0)))
def test_nothing_fits_nothing(budget: int, classes: int) -> None:
    with pytest.raises(SequenceError, match=f"got {budget} bytes and {classes} classes"):
        tokens_per_tile(budget, classes, torch.float32)
