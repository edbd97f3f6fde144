"""What `run_record` costs: processor time of a training step with and without it, and of the record's own calls.

`python bench_record.py [WIDTH]` trains residual blocks at stage 3 on two ranks, one engine with a record and one
without, a step of each in turn; then it makes the calls again that one step made to the record, with nothing around
them. The first figure is what counts and is as noisy as the machine; the second is exact to a few per cent.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import zero_core
from zero_comm import Ledger, Tag, run_ranks
from zero_core.recording.ledger import RecordedLedger
from zero_report import RecordWriter, SpanKind, read_run
from zero_report.record.parsing import Block
from zero_report.record.schema import COLLECTIVES

RANKS, BLOCKS, BATCH, STEPS, REPLAYS = 2, 12, 64, 30, 400
PHASES = {
    SpanKind.GATHER: "gather",
    SpanKind.REDUCE: "reduce",
    SpanKind.PUBLISH: "publish",
    SpanKind.BROADCAST: "broadcast",
}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def engine(width: int, record: str | None) -> zero_core.Engine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "unit_max_numel": 9 * width * width},
        "run_record": {"path": record},
    }
    return zero_core.initialize(model=nn.Sequential(*(Layer(width) for _ in range(BLOCKS))), config=config)[0]


def trained(folder: str, width: int) -> dict[str, list[float]]:
    """Processor seconds of this rank's steps, all threads, by engine."""
    torch.set_num_threads(1)
    x = torch.randn(BATCH, width)
    engines = {"without": engine(width, None), "with": engine(width, folder)}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(STEPS):
        for name, one in engines.items():
            begin = time.process_time()
            one.backward(one(x).square().mean())
            one.step()
            seconds[name].append(time.process_time() - begin)
    for one in engines.values():
        one.destroy()
    return {name: values[5:] for name, values in seconds.items()}


def replayed(block: Block, *, recorded: bool) -> float:
    """Processor seconds of the calls that one step makes to its ledger and record, written out four steps at a time."""
    tags = {span: Tag(PHASES.get(SpanKind(span.kind), "control"), span.name) for span in block.spans}
    values = {"loss": 1.0, "loss_min": 1.0, "loss_max": 1.0, "lr": 1e-3, "grad_norm": 1.0, "loss_scale": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        writer = RecordWriter(folder, rank=0, world_size=RANKS, background=False)
        ledger = RecordedLedger(Ledger(), writer) if recorded else Ledger()
        begin = time.process_time()
        for number in range(REPLAYS):
            for span in block.spans:
                if span.kind in COLLECTIVES:
                    ledger.count(tags[span], span.nbytes)
                    ledger.count_seconds(tags[span], 1e-3, 1e-4)
                elif recorded:
                    start = time.perf_counter()
                    writer.span(SpanKind(span.kind), span.name, start, time.perf_counter())
            if recorded:
                writer.end_step(**values, skipped=0, samples=BATCH)
                if number % 4 == 3:
                    writer.flush()
        seconds = time.process_time() - begin
        writer.close()
    return seconds / REPLAYS


def main() -> None:
    """Print the step's processor time, the ratio with a record to without, and the record's own share."""
    width = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(trained, RANKS, folder, width)[0]
        block = read_run(Path(folder)).last.first.block(STEPS - 2)
    assert block is not None
    step = statistics.median(found["without"])
    ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    own = min(replayed(block, recorded=True) for _ in range(5)) - min(replayed(block, recorded=False) for _ in range(5))
    print(f"step without a record: {step * 1e3:.1f} ms of processor time, {len(block.spans)} spans")
    print(f"with / without: {middle:.4f}, quartiles {low:.4f}-{high:.4f}")
    print(f"calls and writing: {own * 1e6:.0f} us per step, {own / len(block.spans) * 1e6:.2f} us per span,")
    print(f"{100 * own / step:.2f} % of this step; 0.5 % of one of {own * 200 * 1e3:.0f} ms of processor time")


if __name__ == "__main__":
    main()
