"""`zero-core estimate`: the tables on a terminal, for a model that need not exist."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from decimal import Decimal, InvalidOperation
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_core.errors import UsageError
from zero_core.estimate.live import ParameterCount, count_parameters
from zero_core.estimate.model_states import model_states_per_rank
from zero_core.estimate.offload import Estimate, estimate_zero1, estimate_zero2, estimate_zero3

if TYPE_CHECKING:
    from torch import nn

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_STAGES = (1, 2, 3)

_DESCRIPTION = """\
Estimate the memory of parameters, gradients and optimizer states, by tier, for ZeRO stages 1 to 3.
Activations come on top. Counts may be written as 2783959040, 2.78B, 7.5e9 or 65M.

  zero-core estimate --params 2.78B --largest-layer 65.8M --gpus-per-node 8
  zero-core estimate --model my_package.models:build --stage 2 --nodes 4
  zero-core estimate --params 7.5B --world-sizes 1,4,16,64,256,1024
"""


def add_estimate_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `estimate` to the commands of a parser; the parsed namespace's `run(namespace)` returns the exit status.

    `run` prints to standard output. Wrong arguments end the program with status 2, as argparse does.
    """
    parser = subparsers.add_parser(
        "estimate",
        help="memory needed by a model's states, per CPU and per GPU",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--params", type=_count, metavar="N", help="parameters of the model")
    source.add_argument(
        "--model",
        metavar="MODULE:NAME",
        help="a torch module, or a function without arguments that builds one; it is built on the meta device",
    )
    parser.add_argument(
        "--largest-layer",
        type=_count,
        metavar="N",
        help="parameters of the largest single layer (stage 3, with --params)",
    )
    parser.add_argument(
        "--stage", type=int, choices=_STAGES, action="append", help="may be repeated; default: all that can be told"
    )
    parser.add_argument("--gpus-per-node", type=_positive, default=1, metavar="N")
    parser.add_argument("--nodes", type=_positive, default=1, metavar="N")
    parser.add_argument(
        "--buffer-factor", type=float, default=1.5, metavar="F", help="allowance for buffers on the CPU"
    )
    parser.add_argument(
        "--world-sizes",
        type=_positives,
        metavar="N,N,...",
        help="print instead the published formula for these numbers of ranks",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    parser.set_defaults(run=partial(_run, parser))
    return parser


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        total, largest = _counts(arguments)
        if arguments.world_sizes:
            _print_model_states(total, arguments.world_sizes, as_json=arguments.json)
        else:
            _print_estimates(_estimates(total, largest, arguments), as_json=arguments.json)
    except UsageError as error:
        parser.error(str(error))
    return 0


def _counts(arguments: argparse.Namespace) -> tuple[int, int | None]:
    if arguments.model is None:
        return arguments.params, arguments.largest_layer
    if arguments.largest_layer is not None:
        raise UsageError("--largest-layer goes with --params; with --model it is counted")
    counted: ParameterCount = count_parameters(_model(arguments.model))
    return counted


def _estimates(total: int, largest: int | None, arguments: argparse.Namespace) -> list[Estimate]:
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
            raise UsageError("stage 3 keeps one layer whole at a time: give --largest-layer, or --model to count it")
        else:
            made.append(estimate_zero3(total, largest, **setup))
    return made


def _print_estimates(estimates: Sequence[Estimate], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"estimates": [asdict(estimate) for estimate in estimates]}))
        return
    print("\n\n".join(f"ZeRO stage {estimate.stage}\n{estimate}" for estimate in estimates))


def _print_model_states(total: int, world_sizes: Sequence[int], *, as_json: bool) -> None:
    if as_json:
        rows = [
            {"stage": stage, "world_size": n, "bytes": model_states_per_rank(total, stage=stage, world_size=n)}
            for stage in (0, *_STAGES)
            for n in world_sizes
        ]
        print(json.dumps({"total_params": total, "model_states_per_rank": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("stage", title=f"GB (1e9 bytes) of model states per rank, {total:,} parameters, Adam, 16-bit weights")
    for n in world_sizes:
        table.add_column(f"{n} rank{'s' if n > 1 else ''}", justify="right")
    for stage in (0, *_STAGES):
        sizes = [model_states_per_rank(total, stage=stage, world_size=n) / 1e9 for n in world_sizes]
        table.add_row(str(stage), *(f"{size:.3g}" if size < 100 else f"{size:,.0f}" for size in sizes))
    Console().print(table)


def _model(path: str) -> nn.Module:
    """Build the model that `module:name` names, without memory for its parameters."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"--model: expected MODULE:NAME, got {path!r}")
    import torch

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's module is likely here
    with torch.device("meta"):
        try:
            found: Any = import_module(module_name)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"--model {path}: {error}") from error
        model = found if isinstance(found, torch.nn.Module) else found() if callable(found) else found
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"--model {path}: expected a torch.nn.Module or a function that builds one, got {type(model).__name__}"
        )
    return model


def _count(text: str) -> int:
    digits, factor = text.strip().replace("_", "").replace(",", ""), 1
    if digits and digits[-1].upper() in _SUFFIXES:
        digits, factor = digits[:-1], _SUFFIXES[digits[-1].upper()]
    try:
        value = Decimal(digits) * factor
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or value != int(value) or value < 1:
        raise argparse.ArgumentTypeError(f"expected a count such as 2783959040, 2.78B or 65M, got {text!r}")
    return int(value)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def _positives(text: str) -> list[int]:
    return [_positive(part.strip()) for part in text.split(",")]
