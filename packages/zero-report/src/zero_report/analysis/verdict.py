"""The verdict about a run: one sentence about where its time goes, and how it ended.

A share is the part of the step that ranks lost by the causes of one kind. ``causes`` are those of the analysis, among
which a rank to name is found; ``links`` are its transfers, with their speeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..record.reader import Run
from .causes import Causes, Share
from .ending import describe_end
from .links import Link

_WORTH_NAMING = 0.05  # share of the step from which a cause is named; also of steps, for skipped ones
_OTHERS_WAIT = "; the other ranks wait for it"
_MAIN_SHARE = 0.6  # share of a kind's lost seconds from which the causing rank is named


@dataclass
class Verdict:
    """The verdict about a run.

    ``sentence``: where its time goes. ``ended``: how it ended or that it continues; empty if it ended well. ``tone``:
    "good", "mixed" or "bad". ``detail``: lines about the end.
    """

    sentence: str
    ended: str
    tone: str
    detail: str = ""


def judge_run(run: Run, causes: Causes, links: list[Link]) -> Verdict:
    """Return the verdict about a run: its largest cause of lost time, and how it ended.

    ``causes`` and ``links`` are the analysis of its last attempt. A cause below 5 % of the step is not named.
    """
    end = describe_end(run)
    ended, detail, tone = end.text, end.detail, "bad" if end.badly else ""
    if not causes.steps:
        return Verdict(_no_steps_sentence(run), ended, tone or "mixed", detail)
    skipped = _skipped_sentence(run)
    largest = causes.by_kind[0] if causes.by_kind else None
    if largest is None or largest.share < _WORTH_NAMING:
        rest = "" if largest is None else f"; no cause of waiting takes more than {_percent(largest.share)} of the step"
        sentence = f"The ranks spend their time computing{rest}."
        return Verdict(sentence + skipped, ended, tone or ("mixed" if skipped else "good"), detail)
    sentence = _SENTENCES[largest.kind](largest, causes, links)
    return Verdict(sentence + skipped, ended, tone or ("bad" if largest.share >= 0.25 else "mixed"), detail)


def _no_steps_sentence(run: Run) -> str:
    """Return the sentence of the verdict on a run of which no step could be analysed: why there is none."""
    if len(run.last.first.table["first"]):
        return "The record has no spans of a whole step, so no causes of waiting."
    return "No step of this run is over yet."


def _skipped_sentence(run: Run) -> str:
    """Return a sentence if at least 5 % of the last attempt's steps were skipped; empty otherwise."""
    table = run.last.first.table
    steps, skipped = float(table["steps"].sum()), float(np.nansum(table["skipped"]))
    if skipped < _WORTH_NAMING * steps or not skipped:
        return ""
    return f" {skipped:,.0f} of {steps:,.0f} steps were skipped, because a gradient was not finite."


def _data_sentence(share: Share, causes: Causes, _links: list[Link]) -> str:
    """Return the verdict on waits for data; ``share``: of the kind "data", over all ranks; ``causes``: all, to name a
    rank."""
    one = _main_rank(share, causes)
    if one is None:
        return f"The ranks wait for their data, between passes: {_percent(share.share)} of the step."
    follow = "" if causes.ranks == 1 else "; the other rank waits for it" if causes.ranks == 2 else _OTHERS_WAIT
    return f"Rank {one.rank} waits for its data, between passes: {_percent(one.share)} of the step{follow}."


def _rank_sentence(share: Share, causes: Causes, _links: list[Link]) -> str:
    """Return the verdict on ranks that wait for a slower rank; ``share``: of the kind "rank", over all ranks."""
    one = _main_rank(share, causes)
    if one is None:
        return f"The ranks wait for one another, and no single rank is slow: {_percent(share.share)} of the step."
    where = max(one.names, key=lambda name: one.names[name])
    took = f"{_percent(one.share)} of the step"
    during = "" if where == "between passes" else f", mostly in {where}"
    if causes.ranks == 2:
        other = f"rank {one.loser}"
        return f"Rank {one.rank} is slower than {other}{during}: {other} waits for it {took}."
    return f"Rank {one.rank} is slower than the others{during}: they wait for it {took}."


def _tier_sentence(share: Share, causes: Causes, links: list[Link]) -> str:
    """Return the verdict on waits for tiers, with the link most waited for, its transfers and its speed.

    ``share``: of the kind "tier", over all ranks.
    """
    one = _main_rank(share, causes)
    chosen = one or share
    by_link: dict[str, float] = {}
    for name, seconds in chosen.names.items():
        by_link[name.partition(":")[0]] = by_link.get(name.partition(":")[0], 0.0) + seconds
    worst = max(by_link, key=lambda name: by_link[name])
    things = sorted(
        (name.partition(":")[2].strip() for name in chosen.names if name.partition(":")[0] == worst),
        key=_natural_key,
    )
    who = "The ranks wait" if one is None else f"Rank {one.rank} waits"
    link = next((link for link in links if link.name == worst), None)
    speed = (
        f"; it runs at {_percent(link.of_peak)} of its peak, {link.rate / 1e9:.2g} GB/s ({link.source})"
        if link is not None and link.peak
        else ""
    )
    source = worst if link is None else link.full_name
    return f"{who} for {_range_text(things) or 'transfers'} ({source}): {_percent(chosen.share)} of the step{speed}."


def _link_sentence(share: Share, _causes: Causes, links: list[Link]) -> str:
    """Return the verdict on waits for messages under way, with the speed of the link most waited for.

    ``share``: of the kind "link", over all ranks.
    """
    worst = max(share.names, key=lambda name: share.names[name])
    found = max(links, key=lambda link: link.waited, default=None)
    speed = ""
    if found is not None and found.peak:
        speed = f"; {found.name} runs at {_percent(found.of_peak)} of its peak, {found.rate / 1e9:.2g} GB/s"
    return f"The ranks wait for messages under way, mostly {worst}: {_percent(share.share)} of the step{speed}."


def _save_sentence(share: Share, causes: Causes, _links: list[Link]) -> str:
    """Return the verdict on checkpoints that block the run; ``share``: of the kind "save", over all ranks."""
    return f"Checkpoints block the run: {_percent(share.share)} of the steps looked at."


_SENTENCES = {
    "data": _data_sentence,
    "rank": _rank_sentence,
    "tier": _tier_sentence,
    "link": _link_sentence,
    "save": _save_sentence,
}
"""Kind of cause -> the function that returns the sentence about it."""


def _main_rank(share: Share, causes: Causes) -> Share | None:
    """Return the share of the rank that causes at least 60 % of the seconds in ``share``; None if no rank does.

    ``share``: of one kind, over all ranks (an entry of ``causes.by_kind``).
    """
    most = max(causes.of_kind(share.kind), key=lambda own: own.seconds, default=None)
    return most if most is not None and most.seconds >= _MAIN_SHARE * share.seconds else None


def _range_text(things: list[str]) -> str:
    """Return the first and the last of ``things``, which are sorted, as text; the one thing if there is only one, empty
    if there are none."""
    if not things or things == [""]:
        return ""
    return things[0] if len(things) == 1 else f"{things[0]} to {things[-1]}"


def _natural_key(text: str) -> list[tuple[int, int, str]]:
    """Return a key to sort names by, under which layers.10 comes behind layers.9: the parts between periods are
    compared one by one, numbers by length and digits, as Python does not convert very long ones."""
    parts = [(part, part.lstrip("0")) for part in text.split(".")]
    return [(0, len(digits), digits) if part.isdecimal() else (1, 0, part) for part, digits in parts]


def _percent(share: float) -> str:
    """Return a share, 0 to 1, as a whole percentage."""
    return f"{100 * share:.0f} %"
