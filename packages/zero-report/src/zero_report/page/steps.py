"""Single steps, span by span: the strip over all ranks, and memory over the step."""

from __future__ import annotations

from typing import Any

from ..analysis.causes import Causes
from ..record.reader import Attempt, Block
from ..record.schema import OWNERS

_STEPS = 24
_RANKS = 64
_EXTREMES = 16  # ranks that are shown when there are more than _RANKS
_SPANS = 60_000  # in the page
_THINNEST = 1500  # spans shorter than so many parts of the step are left out where there are too many


def steps(attempt: Attempt, causes: Causes) -> dict[str, Any]:
    """Return the steps to look at, with the spans of the ranks to look at; times in microseconds from the first
    rank's begin."""
    ranks = shown_ranks(attempt, causes)
    chosen = _chosen(attempt, len(ranks))
    names: dict[str, int] = {}
    room = _SPANS // max(1, len(chosen) * len(ranks))
    shown = []
    for step in chosen:
        blocks = {rank: block for rank in ranks if (block := attempt.ranks[rank].block(step)) is not None}
        if step == chosen[-1] and any(block.open for block in blocks.values()):
            blocks = {rank: block for rank in ranks if (block := attempt.ranks[rank].last_block()) is not None}
        if blocks:
            shown.append(_step(step, blocks, names, room))
    return {"ranks": ranks, "of": len(attempt.ranks), "names": list(names), "steps": shown, "owners": OWNERS}


def shown_ranks(attempt: Attempt, causes: Causes) -> list[int]:
    """All ranks, or the extreme ones: those that others wait for most and those that lose most, and the first."""
    if len(attempt.ranks) <= _RANKS:
        return sorted(attempt.ranks)
    chosen = {min(attempt.ranks)}
    for share in causes.by_rank:
        chosen.update(rank for rank in (share.rank, share.loser) if rank in attempt.ranks)
        if len(chosen) >= _EXTREMES:
            break
    seconds = sorted(attempt.ranks, key=lambda rank: float(attempt.ranks[rank].table["seconds"].sum()))
    chosen.update(seconds[:2] + seconds[-2:])
    return sorted(chosen)[: _EXTREMES + 4]


def _chosen(attempt: Attempt, ranks: int) -> list[int]:
    """The first, the last and the slowest step that all ranks kept, others evenly between, and the last in which memory
    was looked at; also one not over."""
    common = attempt.steps()
    newest = {step for record in attempt.ranks.values() for step in record.steps[-1:]}
    if not common:
        return sorted(newest)[-1:]
    sample = attempt.first.block(common[-1])
    spans = max(20, len(sample.spans)) if sample is not None else 20
    count = max(3, min(_STEPS, _SPANS // (spans * ranks), len(common)))
    picked = {common[round(number * (len(common) - 1) / max(1, count - 1))] for number in range(count)}
    late = [step for step in common if step > common[0]] or common
    lead = attempt.first
    took = {step: block.us for step in late[-256:] if (block := lead.block(step)) is not None}
    picked.add(max(took, key=lambda step: took[step]))
    looked = [step for step in common if lead.has_memory(step)][-2:]
    return sorted({*picked, *common[-2:], *looked, max(newest)})


def _step(step: int, blocks: dict[int, Block], names: dict[str, int], room: int) -> dict[str, Any]:
    origin = min(block.began for block in blocks.values())
    ranks: list[dict[str, Any]] = []
    for rank, block in blocks.items():
        offset = round((block.began - origin) * 1e6)
        running = set(block.spans[-block.under_way :]) if block.under_way else set()
        spans = sorted(block.spans, key=lambda span: -span.duration)
        if len(spans) > room:
            spans = [span for span in spans if span.duration >= block.us / _THINNEST][:room]
        spans = sorted(spans, key=lambda span: span.begin)
        flat: list[int] = []
        for span in spans:
            number = names.setdefault(span.name, len(names))
            flat += [span.kind, number, span.begin + offset, span.duration, span.waited, span.nbytes]
        memory = [[at + offset, *(owners.get(owner, 0) for owner in OWNERS)] for at, owners in block.memory]
        ranks.append(
            {
                "rank": rank,
                "at": offset,
                "us": block.us,
                "step": block.step,
                "open": block.open,
                "under_way": [at for at, span in enumerate(spans) if span in running],
                "spans": flat,
                "left_out": block.left_out + len(block.spans) - len(spans),
                "memory": memory,
            }
        )
    return {"step": step, "began": origin, "us": max(r["at"] + r["us"] for r in ranks), "ranks": ranks}
