"""One offloaded training step beside its peers: ours against DeepSpeed and FSDP2 with the same model, in one process.

    python tests-integration/bench_offload.py [--rounds 8] [--only NAME ...] [--folder PATH] [--layers N] [--width N]

bfloat16 with float32 masters and states, AdamW, clipping, one rank with all cores. ``2 cpu`` and ``3 cpu`` are the
stages with the optimizer (at stage 3 the parameters too) in host memory, ``3 nvme`` has both in files under
``--folder``. Every contestant has the same configuration, takes one step per round in an order that rotates, and its
ratio is taken within the round. ``optimizer`` is `engine.step()` alone; the rest of a step is forward and backward.
One key differs so that memory does not: a buffer of DeepSpeed's optimizer ring holds one tensor of a sub-group, of ours
master and both moments, so DeepSpeed has 12 and ours 4 (with fewer, and both pipelines, DeepSpeed's step fails).
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "docs" / "examples"))
sys.path.append(str(HERE.parents[1] / "tools"))
from bench_results import save  # noqa: E402

NAMES = (
    "ours 2 cpu",
    "ours 3 cpu",
    "ours 3 nvme",
    "deepspeed 2 cpu",
    "deepspeed 3 cpu",
    "deepspeed 3 nvme",
    "fsdp2 3 cpu",
)
COLUMNS = ("ratio", "step", "`engine.step()` alone", "aim (step)")
PLACES = {"cpu": "in host memory", "nvme": "in files"}
TITLES = {"deepspeed": "DeepSpeed", "fsdp2": "FSDP2"}
AIMS = {"deepspeed": 0.75, "fsdp2": 1.00}
RATE = 1e-4
CLIP = 1.0
WARM_UP = 2


@dataclass
class Contestant:
    """`forward_backward` takes a batch, `step` updates; seconds of both, by round."""

    forward_backward: Callable[[Any, Any], Any]
    step: Callable[[], Any]
    close: Callable[[], None] = lambda: None
    whole: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    loss: float = 0.0


def make_model(args: argparse.Namespace) -> Any:
    import torch
    from model import GPT, Shape

    torch.manual_seed(0)
    return GPT(Shape(args.layers, args.width, args.context))


def config(args: argparse.Namespace, stage: int, tier: str, folder: str, buffers: int) -> dict[str, Any]:
    nvme = {"nvme_path": folder} if tier == "nvme" else {}
    pipelined = {"buffer_count": buffers, "pipeline_read": True, "pipeline_write": True} if tier == "nvme" else {}
    zero: dict[str, Any] = {
        "stage": stage,
        "sub_group_size": args.sub_group_size,
        "offload_optimizer": {"device": tier, "pin_memory": False, **nvme, **pipelined},
    }
    if stage == 3:
        zero["offload_param"] = {"device": tier, "pin_memory": False, **nvme}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": CLIP,
        "steps_per_print": 0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}},
        "zero_optimization": zero,
    }


def engine_contestant(engine: Any, close: Callable[[], None]) -> Contestant:
    def forward_backward(x: Any, y: Any) -> Any:
        loss = engine(x, y)
        engine.backward(loss)
        return loss.detach()

    return Contestant(forward_backward, engine.step, close)


def ours(args: argparse.Namespace, stage: int, tier: str, folder: str) -> Contestant:
    import zero_core

    engine = zero_core.initialize(model=make_model(args), config=config(args, stage, tier, folder, 4))[0]
    return engine_contestant(engine, engine.destroy)


def deepspeed(args: argparse.Namespace, stage: int, tier: str, folder: str) -> Contestant:
    import deepspeed as peer

    model = make_model(args)
    settings = config(args, stage, tier, folder, 12)
    engine, *_ = peer.initialize(model=model, model_parameters=model.parameters(), config=settings)
    return engine_contestant(engine, engine.destroy)


def fsdp2(args: argparse.Namespace, _stage: int, _tier: str, _folder: str) -> Contestant:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = make_model(args)
    options = {
        "mesh": init_device_mesh("cpu", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)

    def forward_backward(x: Any, y: Any) -> Any:
        loss = model(x, y)
        loss.backward()
        return loss.detach()

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(forward_backward, step)


MAKERS = {"ours": ours, "deepspeed": deepspeed, "fsdp2": fsdp2}


def measure(contestants: dict[str, Contestant], args: argparse.Namespace) -> None:
    import torch

    names = list(contestants)
    for turn in range(WARM_UP + args.rounds):
        generator = torch.Generator().manual_seed(turn)
        pieces = torch.randint(256, (args.batch, args.context + 1), generator=generator)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            contestant = contestants[name]
            begin = time.perf_counter()
            loss = contestant.forward_backward(pieces[:, :-1], pieces[:, 1:])
            middle = time.perf_counter()
            contestant.step()
            end = time.perf_counter()
            contestant.loss = float(loss)
            if turn >= WARM_UP:
                contestant.whole.append(end - begin)
                contestant.optimizer.append(end - middle)


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def report(contestants: dict[str, Contestant]) -> list[tuple[str, ...]]:
    """Print the tables; return the rows of the page."""
    kept = []
    print(f"{'milliseconds, median (quartiles)':<34}{'step':>24}{'optimizer':>24}{'last loss':>12}")
    for name, found in contestants.items():
        columns = []
        for values in (found.whole, found.optimizer):
            low, middle, high = (f"{value * 1e3:.0f}" for value in quartiles(values))
            columns.append(f"{middle} ({low} - {high})")
        print(f"{name:<34}{columns[0]:>24}{columns[1]:>24}{found.loss:>12.4f}")
    print(f"\n{'ratio within a round':<34}{'step':>24}{'optimizer':>24}{'aim':>12}")
    for peer in (name for name in contestants if not name.startswith("ours")):
        kind, _, place = peer.partition(" ")
        mine = contestants.get(f"ours {place}")
        if mine is None:
            continue
        columns = []
        for left, right in ((mine.whole, contestants[peer].whole), (mine.optimizer, contestants[peer].optimizer)):
            low, middle, high = quartiles([a / b for a, b in zip(left, right, strict=True)])
            columns.append(f"{middle:.2f} ({low:.2f} - {high:.2f})")
        stage, tier = place.split()
        kept.append((f"stage {stage} {PLACES[tier]} / {TITLES[kind]}", *columns, f"{AIMS[kind]:.2f}"))
        print(f"{'ours / ' + peer:<34}{columns[0]:>24}{columns[1]:>24}{AIMS[kind]:>12.2f}")
    return kept


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=NAMES, help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024, help="8 layers of 1024 are 101 million parameters")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--context", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--sub-group-size", type=int, default=1 << 23, help="elements")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the drive to be measured")
    return parser.parse_args()


def main() -> None:
    args = options()
    import torch.distributed as dist

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        contestants: dict[str, Contestant] = {}
        for name in args.only or NAMES:
            kind, stage, tier = name.split()
            place = Path(folder) / name.replace(" ", "-")
            place.mkdir()
            contestants[name] = MAKERS[kind](args, int(stage), tier, str(place))
        measure(contestants, args)
        save(__file__, "offload", COLUMNS, report(contestants))
        for contestant in contestants.values():
            contestant.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
