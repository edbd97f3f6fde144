"""Data of single steps for the page: the spans that its strip of ranks shows, and memory over the step."""

from __future__ import annotations

from typing import Any

from ..analysis.causes import Causes
from ..record.parsing import Block
from ..record.reader import Attempt
from ..record.schema import OWNERS

_STEPS = 24
_RANKS = 64
_EXTREMES = 16  # ranks to show for what they cause or lose, if there are more than _RANKS
_SPANS = 60_000  # in the page
_THINNEST = 1500  # if there are too many spans, those shorter than 1/1500 of the step are left out


def steps_data(attempt: Attempt, causes: Causes) -> dict[str, Any]:
    """Return the data of the shown steps and ranks, by name; times in microseconds from the first start of a rank's
    step.

    ``ranks``: the shown ones, of ``of`` in all; ``names``: those of spans, which refer to them by index; ``steps``: see
    `_step_data`; ``owners``: in the order of the memory's numbers.
    """
    ranks = shown_ranks(attempt, causes)
    chosen = _chosen_steps(attempt, len(ranks))
    names: dict[str, int] = {}
    room = _SPANS // max(1, len(chosen) * len(ranks))
    shown = []
    for step in chosen:
        blocks = {rank: block for rank in ranks if (block := attempt.ranks[rank].block(step)) is not None}
        if step == chosen[-1] and any(block.open for block in blocks.values()):
            blocks = {rank: block for rank in ranks if (block := attempt.ranks[rank].last_block()) is not None}
        if blocks:
            shown.append(_step_data(step, blocks, names, room))
    return {"ranks": ranks, "of": len(attempt.ranks), "names": list(names), "steps": shown, "owners": OWNERS}


def shown_ranks(attempt: Attempt, causes: Causes) -> list[int]:
    """Return the ranks to show, sorted: all, or with more than 64 at most 20.

    These are the first one, those that cause or lose most time, and the fastest and slowest two.
    """
    if len(attempt.ranks) <= _RANKS:
        return sorted(attempt.ranks)
    chosen = {min(attempt.ranks)}
    for share in causes.by_rank:
        more = chosen.union(rank for rank in (share.rank, share.loser) if rank in attempt.ranks)
        if len(more) > _EXTREMES:
            break
        chosen = more
    seconds = sorted(attempt.ranks, key=lambda rank: float(attempt.ranks[rank].table["seconds"].sum()))
    return sorted({*chosen, *seconds[:2], *seconds[-2:]})


def _chosen_steps(attempt: Attempt, ranks: int) -> list[int]:
    """Return the steps to show, in order; ``ranks``: how many ranks are shown.

    They are the first, the last and the slowest that all ranks kept, others evenly spread between, the last two with
    memory, and the newest step of any rank.
    """
    common = attempt.steps()
    newest = {step for record in attempt.ranks.values() for step in record.steps[-1:]}
    if not common:
        return sorted(newest)[-1:]
    sample = attempt.traced.block(common[-1])
    spans = max(20, len(sample.spans)) if sample is not None else 20
    count = max(3, min(_STEPS, _SPANS // (spans * ranks), len(common)))
    picked = {common[round(number * (len(common) - 1) / max(1, count - 1))] for number in range(count)}
    late = [step for step in common if step > common[0]] or common
    lead = attempt.traced
    took = {step: block.us for step in late[-256:] if (block := lead.block(step)) is not None}
    if took:
        picked.add(max(took, key=lambda step: took[step]))
    looked = [step for step in common if lead.has_memory(step)][-2:]
    return sorted({*picked, *common[-2:], *looked, max(newest)})


def _step_data(step: int, blocks: dict[int, Block], names: dict[str, int], room: int) -> dict[str, Any]:
    """Return the data of one step: per rank at most ``room`` spans, the longest, as flat lists of six integers.

    The six are kind, index into ``names``, begin, duration and waited microseconds, bytes. ``blocks``: the spans by
    rank. ``names``: index of each span's name, to which new names are added. ``left_out`` counts the spans that are not
    shown.
    """
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
