"""A step of eight micro-batches whose parameters stream from a drive: `Engine.train_batch` beside the ordinary loop.

    python tests-integration/bench_train_batch.py [--limit 1.0] [--layers 8] [--width 2048] [--steps 4]

One process, stage 3, fp32, parameters in files, optimizer states in host memory. Both train the same engine in turns.
``--limit``: GB per second that the drive gives this process at most, by the block controller of control groups (root
only; 0: unlimited). Printed: seconds per step (medians and quartiles), and the bytes that the kernel has read for this
process in a step (read_bytes in /proc/self/io) beside the formula: each unit once in forward and once in backward,
except the last one, which stays between them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from bench_results import save

MICRO_BATCHES = 8
GROUP = Path("/sys/fs/cgroup/blkio/zero-bench-train-batch")
COLUMNS = ("drive", "ordinary loop, s", "train_batch, s", "loop / train_batch", "GB read", "formula")


def limit_reads(folder: str, gigabytes: float) -> None:
    """Limit the reads of this process from the drive of ``folder``."""
    device = os.stat(folder).st_dev
    whole = f"{os.major(device)}:0" if os.minor(device) else f"{os.major(device)}:{os.minor(device)}"
    GROUP.mkdir(exist_ok=True)
    (GROUP / "blkio.throttle.read_bps_device").write_text(f"{whole} {int(gigabytes * 1e9)}")
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))


def read_bytes() -> int:
    """The bytes that the kernel has fetched from drives for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def make_engine(layers: int, width: int, folder: str) -> Any:
    import torch
    from torch import nn

    import zero_core

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.wide, self.narrow = (
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.float().square().mean()

    buffers = {"buffer_count": 3, "buffer_size": 8 * width * (width + 1)}  # a layer each: no shard stays in memory
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "steps_per_print": 0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, **buffers},
            "offload_optimizer": {"device": "cpu"},
        },
    }
    torch.manual_seed(0)
    return zero_core.initialize(model=Net(), config=config)[0]


def step_of(engine: Any, unit_by_unit: bool, width: int) -> tuple[float, int]:
    """Take a step; return its seconds and the bytes that were read."""
    import torch

    batches = [torch.randn(4, width) for _ in range(MICRO_BATCHES)]
    start, before = time.perf_counter(), read_bytes()
    if unit_by_unit:
        engine.train_batch(batches)
    else:
        for batch in batches:
            engine.backward(engine(batch))
            engine.step()
    return time.perf_counter() - start, read_bytes() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=1.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as zero-launch sets it for its ranks
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.limit:
            limit_reads(folder, given.limit)
        engine = make_engine(given.layers, given.width, folder)
        units = [unit.layout.numel * 4 for unit in engine.partition.units if unit.releasable]
        formula = 2 * sum(units) - units[-1]
        seconds: dict[bool, list[float]] = {False: [], True: []}
        read: dict[bool, list[int]] = {False: [], True: []}
        for number in range(given.steps + 1):
            for way in (False, True):
                took, fetched = step_of(engine, way, given.width)
                if number:
                    seconds[way].append(took)
                    read[way].append(fetched)
        engine.destroy(unshard=False)

    def shown(values: list[float]) -> str:
        low, middle, high = statistics.quantiles(values, n=4)
        return f"{middle:.2f} ({low:.2f}-{high:.2f})"

    ratio = statistics.median(seconds[False]) / statistics.median(seconds[True])
    drive = f"{given.limit:g} GB/s" if given.limit else "unlimited"
    volume = f"{statistics.median(read[False]) / 1e9:.2f} -> {statistics.median(read[True]) / 1e9:.2f}"
    row = (drive, shown(seconds[False]), shown(seconds[True]), f"{ratio:.2f}", volume, f"{formula / 1e9:.2f}")
    print(" | ".join(COLUMNS))
    print(" | ".join(row))
    save(__file__, "train-batch", COLUMNS, [row])


if __name__ == "__main__":
    main()
