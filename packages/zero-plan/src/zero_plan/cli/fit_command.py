"""`zero-plan fit`: the setups that fit on a machine, those with the lowest bound on the step's time first."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ..errors import PlanError
from ..machine import load_machine
from ..quantities import format_quantity
from ..search import EstimatedChoice, Search, configuration, search
from ..shapes import load_shape
from .machine_command import add_set_option, parse_overrides
from .printing import format_seconds, print_table, progress

_FIT = """\
Estimate every choice of stage, offload tiers, micro-batch, activation checkpointing and ZeRO++ for a transformer on a
machine; print what fits, the fastest bound first, and why each neighbour of the first was not chosen. Exit status 1:
nothing fits.

  zero-plan fit --shape llama-3-8b --machine h100-sxm-80gb-x8 --world-size 64 --train-batch 512 --write ds.json
"""


def add_fit_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `fit` to the parser of `zero-plan`: ``run(options)`` of its parsed options prints the search's
    result and returns the exit status.
    """
    parser = subparsers.add_parser(
        "fit",
        help="search for setups that fit on a machine",
        description=_FIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", required=True, metavar="NAME", help="llama-3-8b, …, or a config.json")
    parser.add_argument("--sequence", type=int, metavar="N", help="tokens of a sequence (default: the shape's)")
    parser.add_argument("--machine", required=True, metavar="NAME", help="a preset or a .toml file: zero-plan machine")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks (default: one node of the machine)")
    parser.add_argument("--train-batch", type=int, required=True, metavar="N", help="sequences of a step, on all ranks")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="of parameters and compute")
    parser.add_argument("--show", type=int, default=10, metavar="N", help="setups to print (default: 10)")
    parser.add_argument("--write", metavar="FILE", help="write the first as a configuration")
    parser.add_argument("--nvme-path", metavar="FOLDER", help="of offload to NVMe in that configuration")
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object: bytes and seconds")
    parser.set_defaults(run=_run_fit)


def _run_fit(options: argparse.Namespace) -> int:
    """Print the result of the search that the options of `zero-plan fit` ask for, and write the first setup to
    ``--write``; return the exit status, 1 if no setup fits. Raises `PlanError` for wrong options and for a file that
    cannot be written.
    """
    machine = load_machine(options.machine).with_values(parse_overrides(options.set), "--set")
    shape = load_shape(options.shape, {"sequence": options.sequence} if options.sequence else None)
    with progress("fit"):
        found = search(
            shape, machine, train_batch=options.train_batch, world_size=options.world_size, dtype=options.dtype
        )
    if options.json:
        print(json.dumps(_search_as_dict(found, options.show), indent=2))
    else:
        _print_search(found, options.show)
    if not found.fitting:
        return 1
    if options.write is not None:
        _write_configuration(options.write, found.fitting[0], options.dtype, options.nvme_path)
    return 0


def _write_configuration(path: str, first: EstimatedChoice, dtype: str, nvme_path: str | None) -> None:
    """Write the choice ``first`` as a configuration to the file ``path``. Raises `PlanError` if the file cannot be
    written, or if the choice needs NVMe and ``nvme_path`` is None.
    """
    text = json.dumps(configuration(first, dtype=dtype, nvme_path=nvme_path), indent=2)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--write {path}: cannot be written: {error}") from error


def _print_search(found: Search, count: int) -> None:
    """Print the first ``count`` setups of ``found`` that fit, and why the neighbours of the first were rejected."""
    print(f"{len(found.fitting):,} of {found.tried:,} setups fit")
    rows = [
        (str(c.choice), format_seconds(c.seconds), c.estimate.time.binding, ", ".join(_format_needs(c)))
        for c in found.fitting[:count]
    ]
    if rows:
        print_table("what fits, the fastest bound first", ("setup", "bound", "bound by", "needs"), rows)
        reasons = [(row.change, row.reason) for row in found.rejected]
        print_table("one change to the first, and why not", ("change", "reason"), reasons)


def _format_needs(candidate: EstimatedChoice) -> list[str]:
    """Return "TIER NEEDED of CAPACITY" for each tier that ``candidate`` uses."""
    return [
        f"{row.tier} {format_quantity(row.needed, 'B')} of {format_quantity(row.capacity or 0, 'B')}"
        for row in candidate.estimate.fits
    ]


def _search_as_dict(found: Search, count: int) -> dict[str, object]:
    """Return the first ``count`` setups of ``found`` that fit, and the rejected neighbours, as plain data for JSON."""
    fitting = [
        {
            **asdict(c.choice),
            "seconds": c.seconds,
            "binding": c.estimate.time.binding,
            "needs": {row.tier: row.needed for row in c.estimate.fits},
        }
        for c in found.fitting[:count]
    ]
    rejected = [asdict(row) for row in found.rejected]
    return {"tried": found.tried, "fit": len(found.fitting), "fitting": fitting, "rejected": rejected}
