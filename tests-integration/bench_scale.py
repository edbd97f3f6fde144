"""Two billion parameters on one process and a drive: built, trained and measured within 8 GiB of memory.

    python tests-integration/bench_scale.py [--layers 40] [--width 2048] [--steps 5] [--limit GIB] [--folder PATH]
                                            [--trace FILE] [--plan]

The model is built inside `zero_core.Init`, whose parameters go to files as they are drawn; parameters and gradients
are bfloat16, masters and both moments float32, all of them in files; a batch is 1 x 256 tokens. A control group
enforces the limit (RLIMIT_DATA where none can be made). It needs 40 GB of disk and takes minutes. ``--plan`` has
zero-plan say first what the run needs on this machine, and then prints planned beside measured: memory, bytes that a
step reads and writes, and its time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _memory_limits import MemoryGroup, find_parent, memory_groups, peak_bytes

HERE = Path(__file__).resolve()
EXAMPLES = HERE.parents[1] / "docs" / "examples"
NEEDED_BYTES = 40_000_000_000
TOKENS = 256


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(args.folder), "buffer_count": 3}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 1 << 23,
            "offload_optimizer": {**nvme, "buffer_count": 4},
            "offload_param": nvme,
        },
        "offload": {"report": True, **({"trace": str(args.trace), "trace_steps": 1} if args.trace else {})},
        "steps_per_print": float("inf"),
    }


def planned(args: argparse.Namespace) -> dict[str, float]:
    """Return zero-plan's numbers for the run: bytes by tier, bytes that a step reads and writes, its least seconds."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    from model import GPT, Shape

    from zero_plan import plan, step_bounds, step_time
    from zero_plan.probe import probe

    config = {**configuration(args), "offload": {}}

    def build() -> torch.nn.Module:
        import zero_core

        torch.set_default_dtype(torch.bfloat16)
        try:
            with zero_core.Init(config):
                return GPT(Shape(args.layers, args.width, TOKENS))
        finally:
            torch.set_default_dtype(torch.float32)

    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    [rank] = plan(build, config, batch=(tokens, tokens), world_size=1).ranks
    time = step_time(step_bounds(rank, probe(disk=str(args.folder), disk_size="1 GiB"), world_size=1))
    needs = {f"{tier} bytes": nbytes for tier, nbytes in rank.needs().items()}
    moved = {"read bytes": rank.read, "written bytes": rank.written}
    return {**needs, **moved, f"seconds ({time.binding})": time.least}


def train(args: argparse.Namespace) -> None:
    """In the limited process."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    from model import GPT, Shape

    import zero_core

    config = configuration(args)
    begin = time.perf_counter()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with zero_core.Init(config):
        model = GPT(Shape(args.layers, args.width, TOKENS))
    torch.set_default_dtype(torch.float32)
    engine = zero_core.initialize(model=model, config=config)[0]
    layout, offloading = engine.partition.layout, engine.offloading
    print(
        f"{layout.used_numel:,} parameters in {len(layout.units)} units, built in {time.perf_counter() - begin:.0f} s; "
        f"held in host memory: {engine.memory_report(by='tier').get('host', 0) / 1e9:.2f} GB of "
        f"{16 * layout.used_numel / 1e9:.1f} GB of states",
        flush=True,
    )
    written = tiers_written(offloading)
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(step)
        pieces = torch.randint(256, (1, TOKENS + 1), generator=generator)
        begin = time.perf_counter()
        loss = engine(pieces[:, :-1], pieces[:, 1:])
        engine.backward(loss)
        middle = time.perf_counter()
        engine.step()
        took, before, written = time.perf_counter() - begin, written, tiers_written(offloading)
        moved = sum(row.nbytes for row in offloading.trace.report() if row.hop != "compute")
        print(
            f"step {step + 1}: loss {float(loss.detach()):.4f}, {took:.1f} s ({middle - begin:.1f} s forward and "
            f"backward), {(written - before) / 1e9:.1f} GB written, {moved / 1e9:.1f} GB read and written, "
            f"{moved / 1e9 / took:.2f} GB/s",
            flush=True,
        )
        if step + 1 < args.steps:
            offloading.trace.clear()
    print(offloading.table(), flush=True)
    print(json.dumps({"written": written}), flush=True)
    engine.destroy(unshard=False)


def tiers_written(offloading: object) -> int:
    return sum(tier.bytes_written() for tier in (offloading.update, offloading.store))  # type: ignore[attr-defined]


def limited(args: argparse.Namespace, group: MemoryGroup | None) -> None:
    limit = int(args.limit * (1 << 30))
    command = [sys.executable, str(HERE), *sys.argv[1:], "--inside", "--folder", str(args.folder)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # freed unit buffers go back to the system
    if group is None:
        command = ["prlimit", f"--data={limit}", *command]
    else:
        group.limit(limit)
        command = group.command(*command)
    begin = time.perf_counter()
    ended = subprocess.run(command, env=environment, check=False)
    if ended.returncode:
        sys.exit(f"bench_scale: the limited process ended with status {ended.returncode}")
    peak = "" if group is None else f"; most memory that was charged: {peak_bytes(group.path) / (1 << 30):.2f} GiB"
    print(f"{time.perf_counter() - begin:.0f} s within {args.limit:g} GiB{peak}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--width", type=int, default=2048, help="40 layers of 2048 are 2.0 billion parameters")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=8.0, help="GiB")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the drive to be used")
    parser.add_argument("--trace", type=Path, help="write what moved in the first step there, for ui.perfetto.dev")
    parser.add_argument("--plan", action="store_true", help="plan the run before it is measured")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = options()
    if args.inside:
        train(args)
        return
    free = shutil.disk_usage(args.folder).free
    if free < NEEDED_BYTES:
        print(f"bench_scale is skipped: {NEEDED_BYTES / 1e9:.0f} GB of disk are needed, {free / 1e9:.1f} GB are free")
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.folder = Path(folder)
        if args.plan:
            begin = time.perf_counter()
            for what, amount in planned(args).items():
                print(f"planned: {what} {amount:,.1f}")
            print(f"planned in {time.perf_counter() - begin:.0f} s", flush=True)
        try:
            find_parent()
        except OSError as error:
            print(f"no control group ({error}): RLIMIT_DATA is the limit")
            limited(args, None)
        else:
            with memory_groups(1) as groups:
                limited(args, groups[0])


if __name__ == "__main__":
    main()
