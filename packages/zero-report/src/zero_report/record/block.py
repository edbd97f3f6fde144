"""The spans of one step, on the writer's side, and their line in the timeline. ``unix`` is Unix seconds at 0 of the
writer's clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .lines import encode_text, json_text
from .schema import SpanKind

SPAN_FIELDS = 6
"""Items of a span in `StepBlock.spans`: kind, name, begin and end, waited seconds, bytes."""
UnderWay = Sequence[tuple[SpanKind, str, float, int]]
"""Spans that have begun and not ended: kind, name, begin and bytes."""
Memory = list[tuple[float, dict[str, int]]] | None
"""Pairs of time and bytes by owner; None if there is none."""
_SPAN_FORMAT = "%d,%d,%.0f,%.0f,%.0f,%.0f"


class StepBlock(NamedTuple):
    """The spans of one step of a rank; times in seconds of the writer's clock.

    ``seconds``: the step's duration so far. ``spans``: a flat list, `SPAN_FIELDS` items for each span. ``left_out``:
    number of spans beyond the bound. ``memory``: pairs of time and bytes by owner, or None.
    """

    step: int
    began: float
    seconds: float
    spans: list[Any]
    left_out: int
    memory: Memory

    @property
    def end(self) -> float:
        """End of the step so far, in seconds of the writer's clock."""
        return self.began + self.seconds

    def encode(self, unix: float, tail: str = "") -> bytes:
        """Return the spans of the step as a line of the timeline. ``tail``: more JSON fields to put into it, each with
        a comma before it."""
        began = self.began
        names: dict[str, int] = {}
        spans = []
        flat = iter(self.spans)
        for kind, name, begin, end, waited, nbytes in zip(flat, flat, flat, flat, flat, flat, strict=True):
            index = names.setdefault(name, len(names))
            spans.append(_SPAN_FORMAT % (kind, index, (begin - began) * 1e6, (end - begin) * 1e6, waited * 1e6, nbytes))
        memory = json_text([[round((at - began) * 1e6), owners] for at, owners in self.memory]) if self.memory else "[]"
        return encode_text(
            f'{{"step":{self.step},"began":{unix + began:.6f},"us":{self.seconds * 1e6:.0f},'
            f'"names":{_names_json(tuple(names))},"spans":[{",".join(spans)}],"left_out":{self.left_out},'
            f'"memory":{memory}{tail}}}'
        )


@lru_cache(maxsize=32)
def _names_json(names: tuple[str, ...]) -> str:
    """Return the names as a JSON list; cached, as consecutive steps have the same names."""
    return json_text(list(names))


class OpenBlock(NamedTuple):
    """A step that has not ended: its ``block`` so far, and the spans under way in it, as (kind, name, begin, bytes)."""

    block: StepBlock
    under_way: UnderWay

    def encode(self, unix: float) -> bytes:
        """Return the step as a line of the timeline; the spans under way come last, as if they ended with the block.
        They are added to the block."""
        block, running = self.block, list(self._begun())
        for kind, name, begin, nbytes in running:
            block.spans.extend((kind, name, begin, block.end, 0.0, nbytes))
        return block.encode(unix, f',"open":true,"under_way":{len(running)}')

    def _begun(self) -> Iterable[tuple[SpanKind, str, float, int]]:
        """Return those spans under way that began before the block's end."""
        return (item for item in self.under_way if item[2] <= self.block.end)
