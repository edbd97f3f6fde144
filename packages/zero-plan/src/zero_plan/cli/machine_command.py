"""`zero-plan machine`: print a machine file. `zero-plan probe`: write one for this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import PlanError
from ..machine import load_machine, presets
from .printing import print_table, progress

_MACHINE = """\
Print a preset or a machine file with the source of every value; without a name, the presets.

  zero-plan machine                            the presets
  zero-plan machine h100-sxm-80gb-x8
  zero-plan machine h100-sxm-80gb-x8 --toml > my.toml  a file to edit
"""
_PROBE = """\
Measure this machine and write a machine file: matrix products per dtype, memory and copy bandwidth, and the drives
below --disk with zero-nvme-aio. Takes about a minute. What cannot be measured here (links, networks, endurance) is
left out; add it by hand or with --set.

  zero-plan probe --disk /mnt/nvme --out my.toml
"""


def add_machine_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `machine` to the parser of `zero-plan`: ``run(options)`` of its parsed options prints a machine
    and returns the exit status.
    """
    parser = subparsers.add_parser(
        "machine",
        help="print a preset or a machine file",
        description=_MACHINE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="a preset, or a .toml file")
    add_set_option(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--toml", action="store_true", help="print the file instead of a table")
    form.add_argument("--json", action="store_true", help="print one JSON object; numbers in bytes, bytes/s, FLOP/s")
    parser.set_defaults(run=_run_machine)


def add_probe_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `probe` to the parser of `zero-plan`: ``run(options)`` of its parsed options measures this
    machine and returns the exit status.
    """
    parser = subparsers.add_parser(
        "probe",
        help="measure this machine into a machine file",
        description=_PROBE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="FILE", help="write there; default: standard output")
    parser.add_argument("--disk", metavar="FOLDER", help="a folder on the drives to measure; default: no drives")
    parser.add_argument("--disk-size", default="1 GiB", metavar="SIZE", help="of the file that is written and read")
    add_set_option(parser)
    parser.set_defaults(run=_run_probe)


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """Add to ``parser`` the option `--set KEY=VALUE`, which replaces a value of the machine; `parse_overrides` reads
    it.
    """
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a value of the machine, such as 'disk.endurance=7 PB'; may be repeated",
    )


def parse_overrides(words: list[str]) -> dict[str, object]:
    """Return, by key, the values that `--set` gives. ``words``: its arguments KEY=VALUE. Raises `PlanError` for one
    without `=`.
    """
    found: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise PlanError(f"--set: expected KEY=VALUE, got {word!r}")
        found[key.strip()] = value.strip()
    return found


def _run_machine(options: argparse.Namespace) -> int:
    """Print the machine that the options of `zero-plan machine` name, or the presets if they name none; return 0.
    Raises `PlanError` for an unknown machine or value.
    """
    if options.name is None:
        machines = {name: load_machine(name) for name in presets()}
        if options.json:
            print(json.dumps({name: machine.name for name, machine in machines.items()}, indent=2))
        else:
            print_table("presets", ("name", "machine"), [(name, machine.name) for name, machine in machines.items()])
        return 0
    machine = load_machine(options.name).with_values(parse_overrides(options.set), "--set")
    if options.toml:
        print(machine.as_toml(), end="")
    elif options.json:
        values = {key: {"value": v.number, "text": v.text, "source": v.source} for key, v in machine.rows()}
        print(json.dumps({"name": machine.name, "values": values}, indent=2))
    else:
        print_table(machine.name, ("key", "value", "source"), [(key, v.text, v.source) for key, v in machine.rows()])
    return 0


def _run_probe(options: argparse.Namespace) -> int:
    """Measure this machine, and print the machine file or write it to ``--out``; return 0. Raises `PlanError` if a
    package or folder is missing or the file cannot be written.
    """
    from ..probe import probe

    with progress("probe"):
        machine = probe(disk=options.disk, disk_size=options.disk_size).with_values(
            parse_overrides(options.set), "--set"
        )
    if options.out is None:
        print(machine.as_toml(), end="")
        return 0
    try:
        Path(options.out).write_text(machine.as_toml(), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--out {options.out}: cannot be written: {error}") from error
    return 0
