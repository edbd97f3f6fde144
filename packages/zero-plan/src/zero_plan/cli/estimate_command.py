"""`zero-plan estimate`: memory, traffic, operations and time bounds of one step."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..errors import PlanError
from ..estimate import StepEstimate, estimate_step
from ..machine import load_machine
from ..quantities import format_quantity, parse_count
from ..setup import ITEMSIZE, STAGES, TIERS, Setup, StateBytes
from ..shapes import load_shape
from ..transformer import CHECKPOINTING, Transformer
from .machine_command import add_set_option, parse_overrides
from .machine_printing import bounds_table, fit_status, fits_table, wear_sentence
from .printing import TextTable, print_tables, progress

_ESTIMATE = """\
Estimate one training step of a transformer: memory of a rank by tier, bytes over each link, operations, the least time
that each resource takes, the resource that binds, wear of the drives. Exit status 1: it does not fit; 3: the machine
file does not give the capacity of a tier that is needed, so it is unknown.

  zero-plan estimate --shape llama-3-8b --machine h100-sxm-80gb-x8 --world-size 64 --stage 3
  zero-plan estimate --layers 48 --hidden 1600 --heads 25 --vocabulary 50257 --sequence 1024 \\
      --machine my.toml --stage 3 --offload-optimizer nvme --set 'disk.endurance=7 PB'
"""


def add_estimate_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `estimate` to the parser of `zero-plan`: ``run(options)`` of its parsed options prints the
    estimate and returns the exit status.
    """
    parser = subparsers.add_parser(
        "estimate",
        help="one step: memory, traffic, operations, time bounds",
        description=_ESTIMATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model")
    model.add_argument("--shape", metavar="NAME", help="llama-3-8b, gpt2-xl, …, or a config.json of Transformers")
    for name in ("layers", "hidden", "heads", "kv-heads", "ffn", "vocabulary", "sequence"):
        model.add_argument(f"--{name}", type=_count_argument, metavar="N")
    model.add_argument(
        "--micro-batch", type=_count_argument, default=1, metavar="N", help="sequences per rank (default: 1)"
    )
    model.add_argument("--checkpointing", choices=CHECKPOINTING, default="none", help="what backward recomputes")
    run = parser.add_argument_group("run")
    run.add_argument("--machine", required=True, metavar="NAME", help="a preset or a .toml file: zero-plan machine")
    run.add_argument("--world-size", type=_count_argument, metavar="N", help="ranks (default: one node of the machine)")
    run.add_argument("--stage", type=int, choices=STAGES, default=3)
    run.add_argument("--accumulation", type=_count_argument, default=1, metavar="N", help="micro-batches per step")
    run.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="of parameters and compute")
    run.add_argument("--gradient-dtype", choices=tuple(ITEMSIZE), help="in which gradients are kept and sent")
    run.add_argument("--offload-optimizer", choices=TIERS, default="device")
    run.add_argument("--offload-parameters", choices=TIERS, default="device")
    run.add_argument("--offload-activations", action="store_true")
    for name in ("hpz", "qwz", "qgz"):
        run.add_argument(f"--{name}", action="store_true", help="ZeRO++")
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object: bytes, operations, seconds")
    parser.set_defaults(run=_run_estimate)


def _run_estimate(options: argparse.Namespace) -> int:
    """Print the estimate that the options of `zero-plan estimate` ask for; return the exit status (see `fit_status`).
    Raises `PlanError` for options that do not go together and for a machine that lacks a value.
    """
    machine = load_machine(options.machine).with_values(parse_overrides(options.set), "--set")
    per_node = int(machine.need("node.devices"))
    ranks = options.world_size or per_node
    setup = Setup(
        stage=options.stage,
        world_size=ranks,
        ranks_per_node=min(per_node, ranks),
        accumulation=options.accumulation,
        bytes=StateBytes.of(options.dtype, gradient=options.gradient_dtype),
        offload_optimizer=options.offload_optimizer,
        offload_parameters=options.offload_parameters,
        hpz=options.hpz,
        qwz=options.qwz,
        qgz=options.qgz,
    )
    with progress("estimate"):
        found = estimate_step(
            _shape_from_options(options),
            setup,
            machine,
            micro_batch=options.micro_batch,
            dtype=options.dtype,
            checkpointing=options.checkpointing,
            offload_activations=options.offload_activations,
        )
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _print_estimate(found, machine.name)
    return fit_status(found.fits)


def _shape_from_options(options: argparse.Namespace) -> Transformer:
    """Return the shape that ``--shape`` names, with numbers replaced by options such as ``--layers``; without
    ``--shape`` the one that these options describe. Raises `PlanError` if they do not describe one.
    """
    given: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence")
        if getattr(options, name) is not None
    }
    if options.shape is not None:
        return load_shape(options.shape, given)
    missing = [f"--{name}" for name in ("layers", "hidden", "heads", "vocabulary", "sequence") if name not in given]
    if missing:
        raise PlanError(f"expected --shape, or {', '.join(missing)} as well")
    return Transformer(**given)


def _print_estimate(found: StepEstimate, machine: str) -> None:
    """Print the tables of the estimate ``found``; ``machine``: the machine's name to show."""
    setup = found.setup
    print(f"{found.params:,} parameters, stage {setup.stage}, {setup.world_size} ranks on {setup.nodes} × ({machine})")
    memory = tuple(
        (row.kind, row.tier, format_quantity(row.nbytes, "B")) for row in (*found.states, *found.residual) if row.nbytes
    )
    traffic = tuple((row.name, format_quantity(row.volume, "B"), f"{row.calls:,}") for row in found.collectives)
    sent = [TextTable("collectives of a step", ("what", "volume", "calls"), traffic)] if traffic else []
    tables = (TextTable("memory of one rank", ("what", "tier", "bytes"), memory), fits_table(found.fits), *sent)
    print_tables((*tables, bounds_table(found.bounds, found.time)))
    if found.wear is not None:
        print(wear_sentence(found.wear))


def _count_argument(text: str) -> int:
    """Return the count that an argument of the command line gives (`parse_count`). Raises argparse's error if it is
    none.
    """
    try:
        return parse_count(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
