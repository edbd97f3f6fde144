"""How many tokens a tile of logits may have within a budget of bytes."""

from __future__ import annotations

import torch

from .errors import SequenceError


def tokens_per_tile(budget_bytes: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Return how many tokens of logits fit ``budget_bytes``: floor(budget_bytes / (vocab_size * bytes per logit)).

    Bytes per logit: those of the logits in ``dtype``, which the head computes them in, and of a copy in the dtype of
    the loss, which is float32 or ``dtype`` if that is wider: 2 + 4 for bfloat16 and float16, 4 + 4 for float32, 8 + 8
    for float64. In backward the copy becomes their gradient; for a narrower ``dtype`` a cast of it takes the place of
    the logits. What the head keeps of its own for backward (soft-capped logits keep one more tensor) comes on top.

    At least 1, as a token is not cut. Raises `SequenceError` for a budget or vocabulary below 1.
    """
    if budget_bytes < 1 or vocab_size < 1:
        raise SequenceError(
            f"tokens_per_tile: expected at least 1 byte and 1 class, got {budget_bytes} bytes and {vocab_size} classes"
        )
    wide = torch.promote_types(dtype, torch.float32)
    return max(1, budget_bytes // (vocab_size * (dtype.itemsize + wide.itemsize)))
