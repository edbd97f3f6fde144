"""`zero-plan table`: the published memory tables, for a model or a number of parameters."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..estimators import Estimate, estimate_zero1, estimate_zero2, estimate_zero3
from ..live import ParameterCount, count_parameters
from ..quantities import parse_count
from ..states import published_table
from .printing import print_table, progress

if TYPE_CHECKING:
    from torch import nn

_STAGES = (1, 2, 3)

_DESCRIPTION = """\
Print the memory of parameters, gradients and optimizer states: DeepSpeed's estimators for stages 1 to 3 with and
without offload, or with --world-sizes table 1 of the ZeRO paper. Activations come on top, see `zero-plan estimate`.
Counts may be written as 2783959040, 2.78B, 7.5e9 or 65M.

  zero-plan table --params 2.78B --largest-layer 65.8M --gpus-per-node 8
  zero-plan table --model my_package.models:build --stage 2 --nodes 4
  zero-plan table --params 7.5B --world-sizes 1,4,16,64,256,1024
"""


def add_table_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command `table` to the parser of `zero-plan` and return the command's own parser.

    ``run(options)`` of its parsed options prints to standard output and returns the exit status. Wrong arguments end
    the program with status 2, as argparse does.
    """
    parser = subparsers.add_parser(
        "table",
        help="memory of a model's states, as the published tables have it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--params", type=_count_argument, metavar="N", help="parameters of the model")
    source.add_argument(
        "--model",
        metavar="MODULE:NAME",
        help="a torch module, or a function without arguments that builds one; it is built on the meta device",
    )
    parser.add_argument(
        "--largest-layer",
        type=_count_argument,
        metavar="N",
        help="parameters of the largest single layer (stage 3, with --params)",
    )
    parser.add_argument(
        "--stage", type=int, choices=_STAGES, action="append", help="may be repeated; default: all that can be told"
    )
    parser.add_argument("--gpus-per-node", type=_positive_argument, default=1, metavar="N")
    parser.add_argument("--nodes", type=_positive_argument, default=1, metavar="N")
    parser.add_argument(
        "--buffer-factor", type=float, default=1.5, metavar="F", help="allowance for buffers on the CPU"
    )
    parser.add_argument(
        "--world-sizes",
        type=_positives_argument,
        metavar="N,N,...",
        help="print instead the published formula for these numbers of ranks",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    parser.set_defaults(run=partial(_run_table, parser))
    return parser


def _run_table(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Print the tables that the options ``arguments`` ask for and return 0; a `PlanError` ends the program with
    ``parser``'s error.
    """
    try:
        total, largest = _parameter_counts(arguments)
        if arguments.world_sizes:
            _print_model_states(total, arguments.world_sizes, as_json=arguments.json)
        else:
            _print_estimates(_table_estimates(total, largest, arguments), as_json=arguments.json)
    except PlanError as error:
        parser.error(str(error))
    return 0


def _parameter_counts(arguments: argparse.Namespace) -> tuple[int, int | None]:
    """Return the parameters of the model that the options name, and of its largest layer (None if that is not known).
    Raises `PlanError` for a model that cannot be built or counted.
    """
    if arguments.model is None:
        return arguments.params, arguments.largest_layer
    if arguments.largest_layer is not None:
        raise PlanError("--largest-layer goes with --params; with --model it is counted")
    with progress(f"build {arguments.model}"):
        counted: ParameterCount = count_parameters(_build_model(arguments.model))
    return counted


def _table_estimates(total: int, largest: int | None, arguments: argparse.Namespace) -> list[Estimate]:
    """Return the estimates of the stages that the options ask for; by default of all stages, without stage 3 if
    ``largest`` is None.

    ``total``, ``largest``: parameters of the model, and of its largest layer. Raises `PlanError` if stage 3 is asked
    for and ``largest`` is None.
    """
    stages = sorted(set(arguments.stage or (stage for stage in _STAGES if stage < 3 or largest is not None)))
    setup: dict[str, Any] = {
        "gpus_per_node": arguments.gpus_per_node,
        "nodes": arguments.nodes,
        "additional_buffer_factor": arguments.buffer_factor,
    }
    made = []
    for stage in stages:
        if stage < 3:
            made.append((estimate_zero1 if stage == 1 else estimate_zero2)(total, **setup))
        elif largest is None:
            raise PlanError("stage 3 keeps one layer whole at a time: give --largest-layer, or --model to count it")
        else:
            made.append(estimate_zero3(total, largest, **setup))
    return made


def _print_estimates(estimates: Sequence[Estimate], *, as_json: bool) -> None:
    """Print the estimates as DeepSpeed's tables, or as one JSON object."""
    if as_json:
        print(json.dumps({"estimates": [asdict(estimate) for estimate in estimates]}))
        return
    print("\n\n".join(f"ZeRO stage {estimate.stage}\n{estimate}" for estimate in estimates))


def _print_model_states(total: int, world_sizes: Sequence[int], *, as_json: bool) -> None:
    """Print the table of the model states' bytes by the published formula, with a row per stage and a column per world
    size, or one JSON object. ``total``: parameters of the model.
    """
    sizes = {(stage, ranks): nbytes for stage, ranks, nbytes in published_table(total, world_sizes)}
    if as_json:
        rows = [{"stage": stage, "world_size": ranks, "bytes": size} for (stage, ranks), size in sizes.items()]
        print(json.dumps({"total_params": total, "model_states_per_rank": rows}))
        return
    cells = [
        (str(stage), *(_format_gigabytes(sizes[stage, ranks]) for ranks in world_sizes))
        for stage in sorted({stage for stage, _ in sizes})
    ]
    columns = ("stage", *(f"{ranks} rank{'s' if ranks > 1 else ''}" for ranks in world_sizes))
    print_table(f"GB (1e9 bytes) of model states per rank, {total:,} parameters, Adam, 16-bit weights", columns, cells)


def _format_gigabytes(nbytes: int) -> str:
    """Return ``nbytes`` in units of 1e9 bytes as text with three digits, without the unit."""
    return f"{nbytes / 1e9:.3g}" if nbytes < 100e9 else f"{nbytes / 1e9:,.0f}"


def _build_model(path: str) -> nn.Module:
    """Return the model that ``path``, "MODULE:NAME", names, or that the function of this name returns, built on the
    meta device.

    Adds the working directory to `sys.path`. Raises `PlanError` if there is no such module or name, or if it gives no
    torch module, and for whatever the module or the function raises.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise PlanError(f"--model: expected MODULE:NAME, got {path!r}")
    import torch

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's module is likely here
    with torch.device("meta"):
        try:
            found: Any = import_module(module_name)
            for part in name.split("."):
                found = getattr(found, part)
            model = found() if callable(found) and not isinstance(found, torch.nn.Module) else found
        except Exception as error:
            raise PlanError(f"--model {path}: {type(error).__name__}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise PlanError(
            f"--model {path}: expected a torch.nn.Module or a function that builds one, got {type(model).__name__}"
        )
    return model


def _count_argument(text: str) -> int:
    """Return the count that an argument of the command line gives (`parse_count`). Raises argparse's error if it is
    none.
    """
    try:
        return parse_count(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive_argument(text: str) -> int:
    """Return the integer >= 1 that an argument of the command line gives. Raises argparse's error for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def _positives_argument(text: str) -> list[int]:
    """Return the integers >= 1 of an argument of the command line such as "1,4,16". Raises argparse's error for
    anything else.
    """
    return [_positive_argument(part.strip()) for part in text.split(",")]
