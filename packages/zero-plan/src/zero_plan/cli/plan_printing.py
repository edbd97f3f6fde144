"""The options and the output that the commands with a dry run share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..bounding import step_bounds
from ..comparing import ComparedRow, compare
from ..errors import PlanError
from ..fitting import judge_fit
from ..limits import step_time, wear
from ..machine import Machine, load_machine
from ..planned import Plan
from .machine_command import add_set_option, parse_overrides
from .machine_printing import fit_status
from .plan_tables import compared_table, plan_tables
from .printing import TextTable, print_tables


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add to ``parser`` the options of a plan: ranks, machine, record of a run, output as JSON or HTML."""
    parser.add_argument("--world-size", required=True, type=int, metavar="N", help="ranks")
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="default: what the configuration says, else all"
    )
    parser.add_argument(
        "--rank", type=int, action="append", metavar="K", help="may be repeated; default: the first and the last"
    )
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="a preset or a machine file: does it fit (exit status 1: no, 3: unknown), and how long does a step take",
    )
    add_set_option(parser)
    parser.add_argument("--checkpoint", action="store_true", help="plan a checkpoint too")
    parser.add_argument(
        "--saved-by", type=int, metavar="N", help="ranks that saved the checkpoint to load; default: as many as load it"
    )
    parser.add_argument("--compare", metavar="RUN", help='the folder of "run_record" of a run: print what it measured')
    parser.add_argument("--json", action="store_true", help="print one JSON object; sizes in bytes")
    parser.add_argument("--html", metavar="FILE", help="write the tables as a page")


def machine_from_options(options: argparse.Namespace) -> Machine | None:
    """Return the machine that ``--machine`` names, with the values of ``--set``; None without ``--machine``. Raises
    `PlanError` for a machine that cannot be loaded, and for ``--set`` without a machine.
    """
    values = parse_overrides(options.set)
    if options.machine is None:
        if values:
            raise PlanError("--set: expected --machine with it, whose values it replaces")
        return None
    return load_machine(options.machine).with_values(values, "--set")


def print_plan(found: Plan, machine: Machine | None, options: argparse.Namespace, title: str) -> int:
    """Print the needs of each rank of the plan ``found``, and what the options of `add_plan_arguments` ask for. Return
    the exit status (see `fit_status`), 0 without ``machine``.

    ``title``: of the page of ``--html``. Raises `PlanError` if the record cannot be compared or the page not written.
    """
    compared = () if options.compare is None else compare(found, options.compare, machine)
    tables = plan_tables(found, machine)
    if compared:
        tables.append(compared_table(compared, options.compare))
    if options.json:
        print(json.dumps({**found.as_dict(), **_extras_as_dict(found, machine, compared)}, indent=2))
    else:
        print_tables(tables)
    if options.html is not None:
        write_page(options.html, title, tables)
    return 0 if machine is None else fit_status(judge_fit(found, machine).rows)


def write_page(path: str, title: str, tables: Sequence[TextTable]) -> None:
    """Write ``tables`` as an HTML page of zero-report with the heading ``title`` to the file ``path``. Raises
    `PlanError` if zero-report is missing or the file cannot be written.
    """
    try:
        from zero_report import PageTable, table_page
    except ModuleNotFoundError as error:
        raise PlanError(f"--html needs {error.name}: pip install 'zero-plan[report]'") from error
    page = table_page(title, [PageTable(*table) for table in tables])
    try:
        page.save(Path(path))
    except OSError as error:
        raise PlanError(f"--html {path}: cannot be written: {error}") from error


def _extras_as_dict(found: Plan, machine: Machine | None, compared: Sequence[ComparedRow]) -> dict[str, Any]:
    """Return what ``--machine`` and ``--compare`` add to the JSON output, as plain data; without a machine or compared
    rows their part is left out.
    """
    extras = {} if machine is None else _verdict_as_dict(found, machine)
    rows = [{**row._asdict(), "error": row.error} for row in compared]
    return {**extras, "compared": rows} if rows else extras


def _verdict_as_dict(found: Plan, machine: Machine) -> dict[str, Any]:
    """Return, as plain data for JSON, whether the plan fits on ``machine``, the least times of each rank's step, and
    the wear of drives. Raises `PlanError` for a value that is needed and that the machine does not give.
    """
    times = []
    for rank in found.ranks:
        rows = step_bounds(rank, machine, world_size=found.world_size)
        time = step_time(rows)
        bounds = [{**row._asdict(), "seconds": row.seconds} for row in rows]
        times.append({"rank": rank.rank, "bounds": bounds, "time": {**time._asdict(), "hidden": time.hidden}})
    fits = [{**asdict(row), "fits": row.fits} for row in judge_fit(found, machine).rows]
    worn = wear(machine, found.written_per_node(int(machine.need("node.devices"))))
    return {
        "machine": machine.name,
        "devices": min(int(machine.need("node.devices")), found.world_size),
        "fits": fits,
        "times": times,
        "wear": None if worn is None else worn._asdict(),
    }
