"""`zero-plan model`: a dry run of a Transformers model, from its configuration alone."""

from __future__ import annotations

import argparse
from typing import Any

from ..dry import plan
from ..errors import PlanError
from ..hugging_face import model_and_batch
from .configuration import read_configuration
from .plan_printing import add_plan_arguments, machine_from_options, print_plan
from .printing import progress

_MODEL = """\
Run the engine dry, as chosen ranks, with a model of Transformers built from its config.json, and say what each rank
holds, its peaks of memory in a step, and what it sends. No weights are read, no memory is allocated.

  zero-plan model --hf-config config.json --config ds.json --batch 1x4096 --world-size 64 --ranks-per-node 8
"""
_MICRO_BATCH_KEY = "train_micro_batch_size_per_gpu"


def add_model_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `model` to the parser of `zero-plan`: ``run(options)`` of its parsed options prints the plan and
    returns the exit status.
    """
    parser = subparsers.add_parser(
        "model",
        help="a dry run of the engine with a model of Transformers",
        description=_MODEL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hf-config", required=True, metavar="FILE", help="the config.json of the model")
    parser.add_argument("--config", required=True, metavar="FILE", help="the engine's configuration")
    parser.add_argument(
        "--batch",
        required=True,
        type=_batch_argument,
        metavar="NxM",
        help="a micro-batch: samples x tokens, or samples",
    )
    add_plan_arguments(parser)
    parser.set_defaults(run=_run_model)


def _run_model(options: argparse.Namespace) -> int:
    """Print the plan of the Transformers model that the options of `zero-plan model` describe; return the exit status
    of `print_plan`. Raises `PlanError` for a run that cannot be planned, also if the engine refuses the configuration.
    """
    machine = machine_from_options(options)
    rows, length = options.batch
    build, batch = model_and_batch(options.hf_config, rows, length)
    config = _read_configuration(options.config, rows, options.ranks_per_node)
    from zero_core import UsageError
    from zero_partition import PartitionError
    from zero_settings import ConfigError

    try:
        with progress(f"model {options.hf_config}"):
            found = plan(
                build,
                config,
                batch=batch,
                world_size=options.world_size,
                ranks=options.rank,
                checkpoint=options.checkpoint,
                saved_by=options.saved_by,
            )
    except (ConfigError, UsageError, PartitionError) as error:
        raise PlanError(f"the engine refuses it: {error}") from error
    return print_plan(found, machine, options, f"plan of {options.hf_config}")


def _read_configuration(path: str, rows: int, ranks_per_node: int | None) -> dict[str, Any]:
    """Return the configuration in the file ``path``, completed by options of the command line.

    ``rows``: samples of ``--batch``, in place of an "auto" micro-batch size. ``ranks_per_node``: replaces the
    configuration's unless None. Raises `PlanError` if the file cannot be read or gives another micro-batch size.
    """
    found = read_configuration(path)
    if found.get(_MICRO_BATCH_KEY, "auto") == "auto" and found.get("train_batch_size", "auto") == "auto":
        found[_MICRO_BATCH_KEY] = rows
    elif found.get(_MICRO_BATCH_KEY, rows) not in ("auto", rows):
        raise PlanError(
            f"--batch: expected {found[_MICRO_BATCH_KEY]} samples, {_MICRO_BATCH_KEY} of {path}, got {rows}"
        )
    if ranks_per_node is not None:
        found["comm"] = {**found.get("comm", {}), "ranks_per_node": ranks_per_node}
    return found


def _batch_argument(text: str) -> tuple[int, int | None]:
    """Return (samples, tokens) of an argument "NxM", (samples, None) of "N". Raises argparse's error for any other
    text.
    """
    rows, times, length = text.partition("x")
    try:
        found = int(rows), int(length) if times else None
    except ValueError:
        found = 0, None
    if found[0] < 1 or (found[1] is not None and found[1] < 1):
        raise argparse.ArgumentTypeError(f"expected samples x tokens, such as 1x4096, or samples, got {text!r}")
    return found
