"""The cost of `deterministic.across_world_sizes` and of an audit: one step with and without, on ranks of one thread.

    python tests-integration/bench_virtual_ranks.py [--ranks 2] [--virtual 4] [--dtypes fp32 bf16] [--tiers none nvme]

Both engines of a pair live in the same processes, have the same model, data and micro-batches, and take one step per
round, in an order that rotates. The ordinary one accumulates as many micro-batches as the other. Ratios are taken
within each round: printed are their median and quartiles, the ratio of the best times, and that of the processor times.
The audited engine audits every step; of what that costs, ``"audit_every": 100`` has a hundredth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "examples"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from bench_results import save

WARM_UP = 3
COLUMNS = ("dtype", "stage", "states on", "across world sizes", "an ordinary step, ms", "audited each step")


def settings(args: argparse.Namespace, stage: int, dtype: str, tier: str, **changes: Any) -> dict[str, Any]:
    tiers = {
        "offload_optimizer": {"device": tier}
        | ({"nvme_path": tempfile.mkdtemp(dir=args.scratch)} if tier == "nvme" else {})
    }
    return {
        "train_micro_batch_size_per_gpu": args.samples,
        "gradient_accumulation_steps": args.virtual // args.ranks,
        "gradient_clipping": 1.0,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {"stage": stage, **(tiers if tier != "none" else {})},
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
        **changes,
    }


def contestant(args: argparse.Namespace, config: dict[str, Any]) -> Callable[[], None]:
    import torch
    from model import GPT, Shape

    import zero_core

    torch.manual_seed(0)
    engine = zero_core.initialize(model=GPT(Shape(args.layers, args.width, args.context)), config=config)[0]
    x = torch.randint(0, 256, (args.samples, args.context), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        for _ in range(args.virtual // args.ranks):
            engine.backward(engine(x, x.roll(-1, 1)))
            engine.step()

    return step


def measure(args: argparse.Namespace, stage: int, dtype: str, tier: str) -> dict[str, list[list[float]]]:
    """Seconds and processor seconds of every step, by contestant."""
    import torch.distributed as dist

    mode = {"deterministic": {"across_world_sizes": args.virtual}}
    makers = {"ordinary": {}, "across world sizes": mode, "audited each step": {"audit_every": 1}}
    steps = {name: contestant(args, settings(args, stage, dtype, tier, **changes)) for name, changes in makers.items()}
    found: dict[str, list[list[float]]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(args.rounds + WARM_UP):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            steps[name]()
            dist.barrier()
            if number >= WARM_UP:
                found[name].append([time.perf_counter() - wall, time.process_time() - processor])
    return found


def row(dtype: str, stage: int, tier: str, found: dict[str, list[list[float]]]) -> tuple[object, ...]:
    """Return the row of the page."""
    quartiles = [
        statistics.quantiles([o[0] / b[0] for o, b in zip(found[name], found["ordinary"], strict=True)], n=4)
        for name in ("across world sizes", "audited each step")
    ]
    (low, across, high), (_, audited, _) = quartiles
    took = f"{statistics.median(base[0] for base in found['ordinary']) * 1e3:.0f}"
    where = "device" if tier == "none" else tier
    return dtype, stage, where, f"{across:.2f} ({low:.2f} - {high:.2f})", took, f"{audited:.2f}"


def ratios(name: str, found: dict[str, list[list[float]]]) -> str:
    ours, base = found[name], found["ordinary"]
    walls = sorted(o[0] / b[0] for o, b in zip(ours, base, strict=True))
    low, median, high = statistics.quantiles(walls, n=4)
    best = min(o[0] for o in ours) / min(b[0] for b in base)
    processor = sum(o[1] for o in ours) / sum(b[1] for b in base)
    took = statistics.median(b[0] for b in base) * 1e3
    return f"{median:5.3f} [{low:5.3f}, {high:5.3f}]  best {best:5.3f}  processor {processor:5.3f}  of {took:6.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--virtual", type=int, default=4)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--tiers", nargs="+", default=["none", "cpu", "nvme"], help="of optimizer states")
    parser.add_argument("--nvme-path", default=None, help="default: where temporary files go")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from zero_comm import run_ranks

    kept = []
    with tempfile.TemporaryDirectory(dir=args.nvme_path) as args.scratch:
        for dtype in args.dtypes:
            for stage, tier in product(args.stages, args.tiers):
                if stage == 0 and tier != "none":
                    continue  # states that every rank has are not offloaded
                found = run_ranks(measure, args.ranks, args, stage, dtype, tier, timeout=900.0)[0]
                for name in found:
                    if name != "ordinary":
                        print(f"{dtype} stage {stage} {tier:4}  {name:20} {ratios(name, found)}", flush=True)
                kept.append(row(dtype, stage, tier, found))
    save(__file__, "virtual-ranks", COLUMNS, kept)


if __name__ == "__main__":
    main()
