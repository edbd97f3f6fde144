"""Digests of tensors and plain data, and which of several ranks' digests are wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import xxhash

_CHUNK = 1 << 24  # elements that come from an accelerator at once


def digest(tensor: torch.Tensor) -> str:
    """Return a 64-bit hexadecimal digest of a tensor's bytes. Bypasses checks of its class; waits for its device."""
    state = xxhash.xxh3_64()
    with torch._C.DisableTorchFunctionSubclass():
        flat = tensor.detach().contiguous().view(-1)
        for start in range(0, flat.numel(), _CHUNK):
            state.update(flat[start : start + _CHUNK].cpu().view(torch.uint8).numpy().data)
    return state.hexdigest()


def digest_of_data(data: Any) -> str:
    """Return a 64-bit digest of ``data`` as JSON, in hexadecimal; other objects in it count as their ``str``."""
    return xxhash.xxh3_64_hexdigest(json.dumps(data, sort_keys=True, default=str).encode())


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors of one shape, dtype and device have the same bytes."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def odd_ranks(digests: Sequence[str | None], owner: int | None) -> list[int]:
    """Return the ranks whose digest is not the right one. ``digests``: by rank, None where a rank lacks the data. The
    right one is that of the rank ``owner`` or, if it is None, of more than half of the ranks; without such a majority,
    all ranks are returned."""
    if owner is not None:
        right: str | None = digests[owner]
    else:
        right, votes = Counter(digests).most_common(1)[0]
        if 2 * votes <= len(digests):
            return list(range(len(digests)))
    return [rank for rank, one in enumerate(digests) if one != right]
