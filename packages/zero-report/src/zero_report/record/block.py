"""The spans of one step, as they are collected and as they are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from .lines import encode_text, json_text
from .schema import SpanKind

SPAN_NUMBERS = 6
"""Numbers that a span is collected as: kind, index into names, begin and end, waited seconds, bytes."""
UnderWay = Sequence[tuple[SpanKind, str, float, int]]
"""What has begun and is not over: kind, name, begin and bytes."""
_FORMAT = "%d,%d,%.0f,%.0f,%.0f,%.0f"


class StepBlock(NamedTuple):
    """One step of a rank; times in seconds of the writer's clock, ``spans`` flat, `SPAN_NUMBERS` for each."""

    step: int
    began: float
    end: float
    spans: list[float]
    names: dict[str, int]
    left_out: int
    memory: Sequence[tuple[float, dict[str, int]]]

    def encode(self, unix: float, tail: str = "") -> bytes:
        """Return the block as a line of the timeline; ``unix``: seconds to add for the time of day; ``tail``: further
        JSON fields.
        """
        began = self.began
        numbers: list[float] = []
        flat = iter(self.spans)
        for kind, name, begin, end, waited, nbytes in zip(flat, flat, flat, flat, flat, flat, strict=True):
            numbers += (kind, name, (begin - began) * 1e6, (end - begin) * 1e6, waited * 1e6, nbytes)
        spans = ",".join([_FORMAT] * (len(numbers) // SPAN_NUMBERS)) % tuple(numbers)
        memory = json_text([[round((at - began) * 1e6), owners] for at, owners in self.memory]) if self.memory else "[]"
        return encode_text(
            f'{{"step":{self.step},"began":{unix + began:.6f},"us":{(self.end - began) * 1e6:.0f},'
            f'"names":{_names_json(tuple(self.names))},"spans":[{spans}],"left_out":{self.left_out},"memory":{memory}'
            f"{tail}}}"
        )


@lru_cache(maxsize=32)
def _names_json(names: tuple[str, ...]) -> str:
    """Return the names as a JSON list; cached, as consecutive steps have the same names."""
    return json_text(list(names))


class OpenBlock(NamedTuple):
    """A step that is not over, and the spans under way in it."""

    block: StepBlock
    under_way: UnderWay

    def encode(self, unix: float) -> bytes:
        """Return the line of the step; spans under way come last, and end at the block's end."""
        block, running = self.block, list(self._running())
        for kind, name, begin, nbytes in running:
            number = block.names.setdefault(name, len(block.names))
            block.spans.extend((kind, number, begin, block.end, 0.0, nbytes))
        return block.encode(unix, f',"open":true,"under_way":{len(running)}')

    def _running(self) -> Iterable[tuple[SpanKind, str, float, int]]:
        return (item for item in self.under_way if item[2] <= self.block.end)
