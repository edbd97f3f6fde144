"""`zero-plan model`: a dry run of a Transformers model, from its configuration alone."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from ..dry import plan
from ..errors import PlanError
from ..hugging_face import model_and_batch
from ..planned import Plan, RankPlan
from ..quantities import show
from .printing import print_table

_MODEL = """\
Run the engine dry, as chosen ranks, with a model of Transformers built from its config.json, and say what each rank
holds, what is alive at the highest moment of a step, and what it sends. No weights are read, no memory is taken.

  zero-plan model --hf-config config.json --config ds.json --batch 1x4096 --world-size 64 --ranks-per-node 8
"""
_AUTO = "train_micro_batch_size_per_gpu"


def add_model_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `model` to the commands of a parser."""
    parser = subparsers.add_parser(
        "model",
        help="a dry run of the engine with a model of Transformers",
        description=_MODEL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hf-config", required=True, metavar="FILE", help="the config.json of the model")
    parser.add_argument("--config", required=True, metavar="FILE", help="the engine's configuration")
    parser.add_argument(
        "--batch", required=True, type=_batch, metavar="NxM", help="a micro-batch: samples x tokens, or samples"
    )
    parser.add_argument("--world-size", required=True, type=int, metavar="N", help="ranks")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="default: what the configuration says")
    parser.add_argument(
        "--rank", type=int, action="append", metavar="K", help="may be repeated; default: the first and the last"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; sizes in bytes")
    parser.set_defaults(run=_model)


def _model(options: argparse.Namespace) -> int:
    rows, length = options.batch
    build, batch = model_and_batch(options.hf_config, rows, length)
    config = _configuration(options.config, rows, options.ranks_per_node)
    from zero_config import ConfigError
    from zero_core import UsageError
    from zero_partition import PartitionError

    try:
        found = plan(build, config, batch=batch, world_size=options.world_size, ranks=options.rank)
    except (ConfigError, UsageError, PartitionError) as error:
        raise PlanError(f"the engine refuses it: {error}") from error
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _print(found)
    return 0


def _configuration(path: str, rows: int, ranks_per_node: int | None) -> dict[str, Any]:
    """Return what a configuration file says, with the micro-batch in the place of "auto"."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"--config {path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"--config {path}: expected a JSON object, got {type(found).__name__}")
    if found.get(_AUTO, "auto") == "auto" and found.get("train_batch_size", "auto") == "auto":
        found[_AUTO] = rows
    elif found.get(_AUTO, rows) not in ("auto", rows):
        raise PlanError(f"--batch: expected {found[_AUTO]} samples, {_AUTO} of {path}, got {rows}")
    if ranks_per_node is not None:
        found["comm"] = {**found.get("comm", {}), "ranks_per_node": ranks_per_node}
    return found


def _print(found: Plan) -> None:
    for rank in found.ranks:
        title = f"rank {rank.rank} of {found.world_size}: "
        held: Counter[tuple[str, str]] = Counter()
        for row in rank.held:
            held[row.kind, row.tier] += row.nbytes
        print_table(
            title + "between two steps",
            ("what", "tier", "bytes"),
            [(kind, tier, show(nbytes, "B")) for (kind, tier), nbytes in held.most_common()],
        )
        for peak in rank.peaks:
            print_table(
                title + f"{show(peak.nbytes, 'B')} of {peak.tier} at the highest moment, {peak.phase}, {peak.place}",
                ("what", "of", "bytes"),
                [(row.kind, row.name, show(row.nbytes, "B")) for row in peak.owners],
            )
        if rank.files:
            said = f"files; a step reads {show(rank.read, 'B')} and writes {show(rank.written, 'B')}"
            print_table(title + said, ("file", "bytes"), [(row.name, show(row.nbytes, "B")) for row in rank.files])
        print_table(title + "sent in a step", ("phase", "calls", "bytes", "of which leave the node"), _sent(rank))


def _sent(rank: RankPlan) -> list[tuple[str, str, str, str]]:
    sums: dict[str, list[int]] = {}
    for row in rank.sent:
        phase = sums.setdefault(row.phase, [0, 0, 0])
        for index, number in enumerate((row.calls, row.sent_bytes, row.across_bytes)):
            phase[index] += number
    return [(name, f"{calls:,}", show(sent, "B"), show(across, "B")) for name, (calls, sent, across) in sums.items()]


def _batch(text: str) -> tuple[int, int | None]:
    rows, times, length = text.partition("x")
    try:
        found = int(rows), int(length) if times else None
    except ValueError:
        found = 0, None
    if found[0] < 1 or (found[1] is not None and found[1] < 1):
        raise argparse.ArgumentTypeError(f"expected samples x tokens, such as 1x4096, or samples, got {text!r}")
    return found
