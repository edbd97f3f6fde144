"""The interface of codecs for compressed communication, and encoded slices as messages of a fixed size."""

from __future__ import annotations

from typing import Protocol

import torch

_SCALE_BYTES = 4


class Codec(Protocol):
    """Encodes a 1-D floating tensor in fewer bytes, and decodes it. What encoding yields is a payload of bytes and the
    scales of its blocks.

    Blocks are counted from element 0 of ``x``: encode whole shards only. Every rank uses an equal codec.
    """

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(payload, scales)`` of ``x`` (1-D, floating) on its device: uint8 of `payload_nbytes` bytes, float32
        of `scales_numel` elements. Called for each slice that this rank sends."""

    def decode(self, payload: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values that ``payload`` and ``scales`` (as of `encode`) stand for into ``out`` (1-D, any floating
        dtype). Called for each encoded slice."""

    def payload_nbytes(self, numel: int) -> int:
        """Return the bytes of the payload that encodes ``numel`` elements; it must depend on ``numel`` alone."""

    def scales_numel(self, numel: int) -> int:
        """Return the number of float32 scales that encoding ``numel`` elements yields; it must depend on ``numel``
        alone."""


class Packets:
    """Encodes slices of ``numel`` elements as packets, messages of one fixed size, and decodes them. A packet is
    ``codec``'s payload, up to three zero bytes, and the scales.

    Attributes:
        nbytes: size of one packet; equal on every rank, because it follows from ``codec`` and ``numel`` alone.
    """

    def __init__(self, codec: Codec, numel: int) -> None:
        self._codec = codec
        self._payload = codec.payload_nbytes(numel)
        self._scales_start = -(-self._payload // _SCALE_BYTES) * _SCALE_BYTES
        self.nbytes = self._scales_start + codec.scales_numel(numel) * _SCALE_BYTES

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        """Return an uninitialised uint8 tensor of shape (``count``, `nbytes`), one row per packet."""
        return torch.empty(count, self.nbytes, dtype=torch.uint8, device=device)

    def write(self, x: torch.Tensor, packet: torch.Tensor) -> None:
        """Encode ``x`` (1-D, floating, ``numel`` elements) into ``packet`` (uint8, `nbytes` elements)."""
        payload, scales = self._codec.encode(x)
        packet[: self._payload].copy_(payload)
        packet[self._payload : self._scales_start].zero_()
        packet[self._scales_start :].copy_(scales.view(torch.uint8))

    def read(self, packet: torch.Tensor, out: torch.Tensor) -> None:
        """Decode ``packet`` (uint8, `nbytes` elements) into ``out`` (1-D, floating, contiguous, ``numel`` elements)."""
        scales = packet[self._scales_start :].view(torch.float32)
        self._codec.decode(packet[: self._payload], scales, out)
