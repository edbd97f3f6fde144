"""The seam for compressed communication."""

from __future__ import annotations

from typing import Protocol

import torch


class Codec(Protocol):
    """Turns a 1-D floating tensor into fewer bytes and back.

    Blocks are anchored at element 0 of ``x``: encode whole shards only.
    """

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(payload, scales)``: uint8 of `payload_nbytes` bytes, float32 of `scales_numel` elements."""

    def decode(self, payload: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the decoded values into ``out`` (1-D, any floating dtype)."""

    def payload_nbytes(self, numel: int) -> int:
        """Bytes of payload for ``numel`` elements."""

    def scales_numel(self, numel: int) -> int:
        """Number of float32 scales for ``numel`` elements."""
