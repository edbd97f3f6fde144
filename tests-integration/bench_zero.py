"""One training step beside its peers: ours against torch DDP, torch FSDP2 and DeepSpeed, on two ranks of one thread.

    python tests-integration/bench_zero.py [--dtypes fp32 bf16] [--rounds 12] [--only NAME ...]

Every contestant lives in the same two processes, has the same model, weights, data and optimizer
(``torch.optim.AdamW(fused=True)``, no clipping), and takes one step per round, in an order that rotates: load from
elsewhere hits all alike. A ratio is taken within each round; its median and quartiles are printed, and beside it the
ratio of the best times and that of the processor time, which counts work and not waiting. A missing peer is an error.

In bf16 ours keeps fp32 masters and accumulates in fp32; DDP is ``model.to(bfloat16)`` with a bf16 reduction and a bf16
optimizer; FSDP2 has fp32 parameters and ``MixedPrecisionPolicy(param_dtype=bfloat16)``; DeepSpeed its `bf16` section.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path += [str(HERE.parents[1] / "docs" / "examples"), str(HERE.parents[1] / "tools")]
from bench_results import save  # noqa: E402

PEERS = {"deepspeed": "0.19.8"}
LIMITS = {"ours 1": ("ddp", 1.10), "ours 2": ("ddp", 1.10), "ours 3": ("fsdp2", 1.00)}
NAMES = ("ddp", "fsdp2", "ours 1", "ours 2", "ours 3", "deepspeed 1", "deepspeed 2", "deepspeed 3")
TITLES = {"ddp": "DDP", "fsdp2": "FSDP2", "ours": "ours", "deepspeed": "DeepSpeed"}
TIMES = ("step", "dtype", "best", "median", "quartiles", "processor")
RATIOS = ("step time, ours / peer", "dtype", "median of rounds", "quartiles", "of the best", "of processor", "aim")
RATE = 3e-4
WARM_UP = 3


@dataclass
class Contestant:
    """A model with its way of training: `step` takes one batch and returns the loss."""

    name: str
    step: Callable[[Any, Any], Any]
    close: Callable[[], None] = lambda: None


@dataclass
class Samples:
    """What was measured of one contestant, step by step: seconds (the slower rank's), processor seconds (all threads,
    mean of the ranks), and rank 0's last loss."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    loss: float = 0.0


# ---------------------------------------------------------------------------------------------------------------------
# The contestants


def make_model(args: argparse.Namespace) -> Any:
    import torch
    from model import GPT, Shape

    torch.manual_seed(0)
    return GPT(Shape(args.layers, args.width, args.context))


def make_optimizer(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=RATE, fused=True)


def plain_step(model: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    def step(x: Any, y: Any) -> Any:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def engine_step(engine: Any) -> Callable[[Any, Any], Any]:
    def step(x: Any, y: Any) -> Any:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def ddp(args: argparse.Namespace, dtype: str, _stage: int) -> Contestant:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = make_model(args)
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
    return Contestant("ddp", plain_step(DistributedDataParallel(model), make_optimizer(model.parameters())))


def fsdp2(args: argparse.Namespace, dtype: str, _stage: int) -> Contestant:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model(args)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if dtype == "bf16" else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return Contestant("fsdp2", plain_step(model, make_optimizer(model.parameters())))


def ours(args: argparse.Namespace, dtype: str, stage: int) -> Contestant:
    import zero_core

    model = make_model(args)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = zero_core.initialize(model=model, optimizer=make_optimizer(model.parameters()), config=config)
    return Contestant(f"ours {stage}", engine_step(engine), engine.destroy)


def deepspeed(args: argparse.Namespace, dtype: str, stage: int) -> Contestant:
    import deepspeed as peer

    model = make_model(args)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = peer.initialize(model=model, optimizer=make_optimizer(model.parameters()), config=config)
    return Contestant(f"deepspeed {stage}", engine_step(engine), engine.destroy)


MAKERS = {"ddp": ddp, "fsdp2": fsdp2, "ours": ours, "deepspeed": deepspeed}


# ---------------------------------------------------------------------------------------------------------------------
# Measuring, in each rank


def measure(contestants: list[Contestant], args: argparse.Namespace) -> dict[str, Samples]:
    """Let every contestant take one step per round."""
    import torch
    import torch.distributed as dist

    found = {c.name: Samples() for c in contestants}
    for turn in range(WARM_UP + args.rounds):
        generator = torch.Generator().manual_seed(turn * dist.get_world_size() + dist.get_rank())
        pieces = torch.randint(256, (args.batch, args.context + 1), generator=generator)
        first = turn % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            dist.barrier()
            begin, begin_processor = time.perf_counter(), time.process_time()
            loss = contestant.step(pieces[:, :-1], pieces[:, 1:])
            took = [time.perf_counter() - begin, time.process_time() - begin_processor]
            by_rank = [torch.empty(2, dtype=torch.float64) for _ in range(dist.get_world_size())]
            dist.all_gather(by_rank, torch.tensor(took, dtype=torch.float64))
            wall, processor = zip(*(values.tolist() for values in by_rank), strict=True)
            samples = found[contestant.name]
            samples.loss = float(loss)
            if turn >= WARM_UP:
                samples.wall.append(max(wall))
                samples.processor.append(statistics.fmean(processor))
    return found


def run_rank(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    dist.init_process_group("gloo")
    times: list[tuple[str, ...]] = []
    ratios: list[tuple[str, ...]] = []
    for dtype in args.dtypes:
        contestants = []
        for name in args.only or NAMES:
            kind, _, stage = name.partition(" ")
            contestants.append(MAKERS[kind](args, dtype, int(stage or 0)))
        found = measure(contestants, args)
        if dist.get_rank() == 0:
            report(dtype, found, args, times, ratios)
        for contestant in contestants:
            contestant.close()
        del contestants
    if dist.get_rank() == 0:
        save(__file__, "zero-times", TIMES, times)
        save(__file__, "zero-ratios", RATIOS, ratios)
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# Reporting, in rank 0


def report(
    dtype: str,
    found: dict[str, Samples],
    args: argparse.Namespace,
    kept_times: list[tuple[str, ...]],
    kept_ratios: list[tuple[str, ...]],
) -> None:
    """Print the tables of one dtype, and append their rows to those that are kept."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 110)
    title = f"{dtype}: one step, {args.batch} x {args.context} tokens per rank, {args.rounds} rounds, milliseconds"
    times = Table("contestant", title=title, title_justify="left", title_style="bold", min_width=84)
    for column in ("best", "median", "quartiles", "processor", "last loss"):
        times.add_column(column, justify="right")
    for name, samples in found.items():
        low, middle, high = (f"{value * 1e3:.0f}" for value in quartiles(samples.wall))
        processor = f"{statistics.median(samples.processor) * 1e3:.0f}"
        best = f"{min(samples.wall) * 1e3:.0f}"
        times.add_row(name, best, middle, f"{low} - {high}", processor, f"{samples.loss:.4f}")
        kept_times.append((title_of(name), dtype, best, middle, f"{low} - {high}", processor))
    console.print(times)
    title = f"{dtype}: ratios of step times, lower is better for ours"
    ratios = Table("", title=title, title_justify="left", title_style="bold", min_width=84)
    for column in ("median of rounds", "quartiles", "of the best", "of processor", "aim"):
        ratios.add_column(column, justify="right")
    for ours, peer, aim in pairs(list(found)):
        mine, other = found[ours], found[peer]
        low, middle, high = (f"{v:.2f}" for v in quartiles([a / b for a, b in zip(mine.wall, other.wall, strict=True)]))
        best = f"{min(mine.wall) / min(other.wall):.2f}"
        processor = f"{statistics.median(mine.processor) / statistics.median(other.processor):.2f}"
        ratios.add_row(f"{ours} / {peer}", middle, f"{low} - {high}", best, processor, aim)
        against = f"{title_of(ours).removeprefix('ours, ')} / {title_of(peer).partition(',')[0]}"
        kept_ratios.append((against, dtype, middle, f"{low} - {high}", best, processor, aim.removeprefix("<= ")))
    if ratios.row_count:
        console.print(ratios)


def title_of(name: str) -> str:
    """Return a contestant's name as the page has it: "ours, stage 1" of "ours 1"."""
    kind, _, stage = name.partition(" ")
    return TITLES[kind] + (f", stage {stage}" if stage else "")


def pairs(names: list[str]) -> list[tuple[str, str, str]]:
    """(ours, the peer, the aim in words) for everything that was measured."""
    against = [(ours, peer, f"<= {limit:.2f}") for ours, (peer, limit) in LIMITS.items()]
    against += [(ours, ours.replace("ours", "deepspeed"), "") for ours in LIMITS]
    return [row for row in against if row[0] in names and row[1] in names]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


# ---------------------------------------------------------------------------------------------------------------------
# Starting


def check_peers(wanted: list[str] | None) -> None:
    for name, version in PEERS.items():
        if wanted and not any(word.startswith(name) for word in wanted):
            continue
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != version:
            sys.exit(f"bench_zero: expected {name} {version}, found {found}: pip install {name}=={version}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=NAMES, help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="8 layers of 512 are 25.5 million parameters")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    return parser.parse_args()


def main() -> None:
    args = options()
    if "RANK" in os.environ:
        run_rank(args)
        return
    check_peers(args.only)
    from zero_launch import LaunchError, LaunchSpec, launch

    env = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore::FutureWarning"}
    try:
        launch(LaunchSpec(str(HERE), args=tuple(sys.argv[1:]), nproc=2, direct_rank=0, quiet=True, env=env))
    except LaunchError as error:
        sys.exit(f"bench_zero: {error}")


if __name__ == "__main__":
    main()
