"""The analysis of a run's last attempt, in one pass over a sample of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from ..record.reader import Attempt, Run
from .causes import Causes, CauseSums, chosen_steps
from .links import Link, LinkSums
from .units import AllUnits, UnitSums
from .verdict import Verdict, judge_run


@dataclass
class Analysis:
    """The results of the analysis: verdict, causes of waiting, transfers by link, totals by unit."""

    verdict: Verdict
    causes: Causes
    links: list[Link]
    units: list[UnitSums]


def analyse(run: Run) -> Analysis:
    """Analyse a sample of the last attempt's steps: find the causes of waits, add up transfers and units, and judge the
    run."""
    causes, links, units = CauseSums(), LinkSums(), AllUnits()
    for step in chosen_steps(run.last):
        blocks = {r: block for r, record in run.last.ranks.items() if (block := record.block(step)) is not None}
        causes.add(step, blocks)
        links.add(blocks)
        units.add(blocks)
    notes = [note for record in run.last.ranks.values() for note in record.notes]
    found, speeds = causes.result(), links.result(notes, _drive_folders(run.last))
    return Analysis(judge_run(run, found, speeds), found, speeds, units.result())


def _drive_folders(attempt: Attempt) -> str:
    """Return the folders of swap files that the attempt's configuration names (its `nvme_path`s), joined by commas;
    empty without any."""
    rows = attempt.facts.get("configuration", [])
    pairs = [(str(row[0]), row[1]) for row in rows if isinstance(row, list) and len(row) > 1]
    return ", ".join(dict.fromkeys(str(value) for path, value in pairs if path.endswith(".nvme_path") and value))
