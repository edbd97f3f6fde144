"""The options and the output that the commands with a dry run share."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from ..bounding import step_bounds
from ..fitting import judge_fit
from ..limits import step_time
from ..machine import Machine, load_machine
from ..planned import LoadedPlan, Peak, Plan, RankPlan, SavedPlan
from ..quantities import format_quantity
from .machine_printing import print_bounds, print_fits
from .printing import print_table


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan to a parser: ranks, machine, output as JSON."""
    parser.add_argument("--world-size", required=True, type=int, metavar="N", help="ranks")
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="default: what the configuration says, else all"
    )
    parser.add_argument(
        "--rank", type=int, action="append", metavar="K", help="may be repeated; default: the first and the last"
    )
    parser.add_argument(
        "--machine", metavar="NAME", help="a preset or a machine file: does it fit, and how long does a step take"
    )
    parser.add_argument("--checkpoint", action="store_true", help="plan a checkpoint too")
    parser.add_argument("--json", action="store_true", help="print one JSON object; sizes in bytes")


def machine_from_options(options: argparse.Namespace) -> Machine | None:
    """Return the machine that ``--machine`` names; None without the option. Raises `PlanError` as `load_machine`
    does.
    """
    return None if options.machine is None else load_machine(options.machine)


def print_plan(found: Plan, machine: Machine | None, *, as_json: bool) -> int:
    """Print the needs of each rank, and with ``machine`` the least times and whether they fit; return the exit status,
    1 if they do not fit.
    """
    fits = None if machine is None else judge_fit(found, machine)
    if as_json:
        print(
            json.dumps({**found.as_dict(), **({} if machine is None else _verdict_as_dict(found, machine))}, indent=2)
        )
    else:
        for rank in found.ranks:
            _print_rank(rank, f"rank {rank.rank} of {found.world_size}: ")
            if machine is not None:
                bounds = step_bounds(rank, machine, world_size=found.world_size)
                print_bounds(bounds, step_time(bounds))
        if fits is not None:
            print_fits(fits.rows)
    return 1 if fits is not None and any(row.fits is False for row in fits.rows) else 0


def _verdict_as_dict(found: Plan, machine: Machine) -> dict[str, object]:
    """Return whether the plan fits on a machine, and the least times of each rank's step, as plain data for JSON."""
    times = []
    for rank in found.ranks:
        rows = step_bounds(rank, machine, world_size=found.world_size)
        time = step_time(rows)
        bounds = [{**row._asdict(), "seconds": row.seconds} for row in rows]
        times.append({"rank": rank.rank, "bounds": bounds, "time": {**time._asdict(), "hidden": time.hidden}})
    fits = [{**asdict(row), "fits": row.fits} for row in judge_fit(found, machine).rows]
    return {"machine": machine.name, "fits": fits, "times": times}


def _print_rank(rank: RankPlan, title: str) -> None:
    """Print the tables of one rank; ``title``: text before the title of each table."""
    held: Counter[tuple[str, str]] = Counter()
    for row in rank.held:
        held[row.kind, row.tier] += row.nbytes
    print_table(
        title + "between two steps",
        ("what", "tier", "bytes"),
        [(kind, tier, format_quantity(nbytes, "B")) for (kind, tier), nbytes in held.most_common()],
    )
    _print_peaks(rank.peaks, title)
    if rank.files:
        rows = [(row.name, format_quantity(row.nbytes, "B")) for row in rank.files]
        print_table(title + "files", ("file", "bytes"), rows)
    print_table(title + "sent in a step", ("phase", "calls", "bytes", "of which leave the node"), _sent_rows(rank))
    links = [(link, format_quantity(nbytes, "B")) for link, nbytes in rank.bytes_by_link().items()]
    flops = [(f"operations in {dtype}", format_quantity(count, "FLOP")) for dtype, count in sorted(rank.flops.items())]
    print_table(title + "moved and computed in a step", ("link", "amount"), [*links, *flops])
    if rank.saved is not None:
        _print_save(rank.saved, title)
    if rank.loaded is not None:
        _print_load(rank.loaded, title)


def _print_peaks(peaks: Iterable[Peak], title: str) -> None:
    """Print a table of the largest owners for each peak."""
    for peak in peaks:
        print_table(
            title + f"{format_quantity(peak.nbytes, 'B')} of {peak.tier} at the peak, {peak.phase}, {peak.place}",
            ("what", "of", "bytes"),
            [(row.kind, row.name, format_quantity(row.nbytes, "B")) for row in peak.owners],
        )


def _print_save(saved: SavedPlan, title: str) -> None:
    """Print the peaks and files of a checkpoint's save; ``title``: text before the title of each table."""
    _print_peaks(saved.peaks, title)
    rows = [
        (row.name, format_quantity(row.nbytes, "B"), "linked" if row.name in saved.linked else "written")
        for row in saved.files
    ]
    rows.append(("messages, in host memory", format_quantity(saved.message_nbytes, "B"), "sent"))
    if saved.copied_nbytes:
        rows.append(("copies, in host memory", format_quantity(saved.copied_nbytes, "B"), "kept"))
    print_table(title + f"a save, which writes {format_quantity(saved.written, 'B')}", ("file", "bytes", "how"), rows)


def _print_load(loaded: LoadedPlan, title: str) -> None:
    """Print the peaks and bytes of a checkpoint's load; ``title``: text before the title of each table."""
    _print_peaks(loaded.peaks, title)
    rows = [
        ("read from the checkpoint", format_quantity(loaded.read, "B")),
        ("written to the tier on NVMe", format_quantity(loaded.written, "B")),
        ("slices read for a part of them, in host memory, at most", format_quantity(loaded.scratch_nbytes, "B")),
    ]
    print_table(title + f"loading a checkpoint of world size {loaded.saved_by}", ("what", "bytes"), rows)


def _sent_rows(rank: RankPlan) -> list[tuple[str, str, str, str]]:
    """Return per phase of a step the cells: phase, calls, sent bytes, bytes that leave the node."""
    sums: dict[str, list[int]] = {}
    for row in rank.sent:
        phase = sums.setdefault(row.phase, [0, 0, 0])
        for index, number in enumerate((row.calls, row.sent_bytes, row.across_bytes)):
            phase[index] += number
    return [
        (name, f"{calls:,}", format_quantity(sent, "B"), format_quantity(across, "B"))
        for name, (calls, sent, across) in sums.items()
    ]
