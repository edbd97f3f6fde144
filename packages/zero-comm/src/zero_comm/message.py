"""The message that every rank sends where the ranks agree, and its bytes on the wire."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .tag import in_step

FRAME_BYTES = 512
"""Bytes of a frame, in which every message begins: four with the message's size, then as much of it as fits."""


@dataclass(frozen=True)
class Message:
    """One rank's message at a point where all ranks agree.

    ``kind``, ``name`` and ``step`` (or `NO_STEP`) identify the call that the rank is in; ``payload`` is plain data that
    goes through JSON, so tuples arrive as lists. `Control` fills in the others from `Watched`: the micro-batches that
    the rank has counted, its request (a number; the highest is agreed on) and the bits that it announces.
    """

    kind: str
    name: str
    step: int
    payload: Any = None
    micro_batches: int = 0
    request: int = 0
    announced: int = 0

    def __str__(self) -> str:
        """Return the call in words, for errors and logs: kind, name, step, and the micro-batches that the rank has
        counted, as "gathered 'layers.0' in step 3 after 4 micro-batches"."""
        after = f" after {self.micro_batches} micro-batches" if self.micro_batches else ""
        return f"{self.kind} '{self.name}'{in_step(self.step)}{after}"

    def same_call(self, other: Message) -> bool:
        """Return whether ``other`` has the same kind, name and step: both ranks are at the same call."""
        return (self.kind, self.name, self.step) == (other.kind, other.name, other.step)

    def encode(self) -> bytes:
        """Return the message as JSON in bytes, for `decode_message`; ``request`` and ``announced``, which are rarely
        set, are left out if both are zero."""
        fields = [self.kind, self.name, self.step, self.payload, self.micro_batches]
        rare = [self.request, self.announced]
        return json.dumps([*fields, *rare] if any(rare) else fields).encode()


def decode_message(body: bytes) -> Message:
    """Return the message that `Message.encode` turned into ``body``."""
    return Message(*json.loads(body))


def make_frame(body: bytes) -> bytes:
    """Return the frame for ``body``, an encoded message: its size in four bytes, and as much of it as fits, in
    `FRAME_BYTES` bytes in all."""
    return (len(body).to_bytes(4, "little") + body[: FRAME_BYTES - 4]).ljust(FRAME_BYTES, b"\0")


def distinct_messages(messages: Sequence[Message]) -> list[Message]:
    """Return each object in ``messages`` once, in the order of first occurrence. Ranks that sent the same message share
    one object, so that few are left to look at."""
    return list(dict(zip(map(id, messages), messages, strict=True)).values())
