"""The seam for compressed communication, and encoded slices as messages of a fixed size."""

from __future__ import annotations

from typing import Protocol

import torch

_SCALE_BYTES = 4


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


class Packets:
    """The form in which ``numel`` elements travel through ``codec``: payload, up to three zero bytes, scales.

    Attributes:
        nbytes: size of one packet; the same on every rank, because it follows from ``codec`` and ``numel`` alone.
    """

    def __init__(self, codec: Codec, numel: int) -> None:
        self._codec = codec
        self._payload = codec.payload_nbytes(numel)
        self._scales_start = -(-self._payload // _SCALE_BYTES) * _SCALE_BYTES
        self.nbytes = self._scales_start + codec.scales_numel(numel) * _SCALE_BYTES

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        """Room for ``count`` packets: uint8 of shape (count, nbytes)."""
        return torch.empty(count, self.nbytes, dtype=torch.uint8, device=device)

    def write(self, x: torch.Tensor, packet: torch.Tensor) -> None:
        """Encode the 1-D floating ``x`` into ``packet`` (uint8, `nbytes` elements)."""
        payload, scales = self._codec.encode(x)
        packet[: self._payload].copy_(payload)
        packet[self._payload : self._scales_start].zero_()
        packet[self._scales_start :].copy_(scales.view(torch.uint8))

    def read(self, packet: torch.Tensor, out: torch.Tensor) -> None:
        """Decode ``packet`` into ``out`` (1-D, floating, contiguous)."""
        scales = packet[self._scales_start :].view(torch.float32)
        self._codec.decode(packet[: self._payload], scales, out)
