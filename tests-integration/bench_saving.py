"""How long training stands still for a save behind it, beside a save at once of the same state.

    python tests-integration/bench_saving.py [--rounds 9] [--only "3 nvme bf16" ...] [--folder PATH]
    zero-launch --nproc 2 tests-integration/bench_saving.py --only "3 device bf16" ...

AdamW, one rank with all cores, or the ranks of a launcher, of which the slowest counts. At stage 3 one rank keeps its
weights gathered: user code can write them, as at stages 0 to 2; several release them. A row is a stage, where the
state lies (``device``; ``cpu``: the optimizer in host memory, at stage 3 the parameters too; ``nvme``: the same in
files) and a dtype. Two engines of the same model take steps and save in turn: one as with
``checkpoint.writer.decoupled``, one without. ``behind`` is for how long the thread that trains is blocked: in the call
of `save_checkpoint`, and where it waits for the copy afterwards; ``at once`` is the call alone; the ratio is taken
within the round, its aim is at most 2 %. ``slowdown`` is all that the save behind costs training, the work of copying
and writing beside it on the same cores included: the call and the steps until it is written, less the time of as many
steps without a save. ``written`` is when it is on disk, as seen after a step.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "examples"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from bench_results import save

ROWS = [
    f"{stage} {tier} {dtype}"
    for tier in ("device", "cpu", "nvme")
    for stage in (0, 1, 2, 3)
    for dtype in ("fp32", "bf16")
    if stage or tier == "device"
]
AIM = 0.02
PAGE = ("stage, tier, dtype", "ratio, %", "blocked, ms", "at once, ms", "slowdown, ms", "2 %")
COLUMNS = ("behind", "at once", "ratio", "slowdown", "written")
WARM_UP = 2
STEPS_BEFORE = 3


def config(stage: int, tier: str, dtype: str, folder: Path, decoupled: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    place: dict[str, Any] = {"device": tier} | ({"nvme_path": str(folder)} if tier == "nvme" else {})
    if tier != "device":
        zero["offload_optimizer"] = place
        if stage == 3:
            zero["offload_param"] = place
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "checkpoint": {"writer": {"decoupled": decoupled}, "keep_last": 1},
    }


class Save(NamedTuple):
    """Seconds of one save: for which training was blocked, by which it was slowed down, until it was written."""

    blocked: float
    slowdown: float
    written: float


class Contestant:
    """An engine that saves after its steps."""

    def __init__(self, args: argparse.Namespace, row: str, decoupled: bool, folder: Path) -> None:
        import torch
        from model import GPT, Shape

        import zero_core

        stage, tier, dtype = row.split()
        torch.manual_seed(0)
        model = GPT(Shape(args.layers, args.width, args.context))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        folder.mkdir(exist_ok=True)
        settings = config(int(stage), tier, dtype, folder, decoupled)
        self.engine = zero_core.initialize(model=model, config=settings)[0]
        self._checkpoints = self.engine._parts.checkpoints
        self._context, self._folder = args.context, folder / "checkpoints"

    def step(self, turn: int) -> float:
        """Take a step; return its seconds."""
        import torch

        generator = torch.Generator().manual_seed(turn)
        pieces = torch.randint(256, (1, self._context + 1), generator=generator)
        begin = time.perf_counter()
        self.engine.backward(self.engine(pieces[:, :-1], pieces[:, 1:]))
        self.engine.step()
        return time.perf_counter() - begin

    def save(self, turn: int) -> Save:
        """Save, and take steps until the checkpoint is written."""
        saver = self._checkpoints._saver
        saver.take_waited()
        usual = [self.step(turn) for _ in range(STEPS_BEFORE)]
        begin = time.perf_counter()
        self.engine.save_checkpoint(str(self._folder), tag=f"t{turn}")
        called = time.perf_counter() - begin
        steps = 0
        while steps == 0 or worst(float(saver.is_writing)):
            self.step(turn)
            steps += 1
        written = time.perf_counter() - begin
        self._checkpoints.wait()
        slowdown = written - steps * statistics.median(usual)
        return Save(worst(called + saver.take_waited()), worst(slowdown), worst(written))


def worst(value: float) -> float:
    """The greatest of all ranks."""
    import torch
    import torch.distributed as dist

    values = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return float(values)


def measure(args: argparse.Namespace, row: str, folder: Path) -> tuple[str, ...]:
    """Print a row; return that of the page."""
    behind, at_once = (Contestant(args, row, decoupled, folder / str(decoupled)) for decoupled in (True, False))
    times: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for turn in range(WARM_UP + args.rounds):
        found = {}
        for name, contestant in (("behind", behind), ("at once", at_once))[:: 1 if turn % 2 else -1]:
            found[name] = contestant.save(turn)
        if turn >= WARM_UP:
            times["behind"].append(found["behind"].blocked)
            times["at once"].append(found["at once"].blocked)
            times["ratio"].append(found["behind"].blocked / found["at once"].blocked)
            times["slowdown"].append(found["behind"].slowdown)
            times["written"].append(found["behind"].written)
    columns = []
    for name, values in times.items():
        factor, digits = (1e2, 2) if name == "ratio" else (1e3, 1)
        low, middle, high = (f"{value * factor:.{digits}f}" for value in quartiles(values))
        columns.append(f"{middle} ({low} - {high})")
    reached = "reached" if statistics.median(times["ratio"]) <= AIM else "missed"
    say(f"{row:<16}" + "".join(f"{column:>24}" for column in columns) + f"{reached:>9}")
    for contestant in (behind, at_once):
        contestant.engine.destroy()
    blocked, at_once_column, ratio, slowdown, _written = columns
    return row, ratio, blocked.partition(" ")[0], at_once_column.partition(" ")[0], slowdown, reached


def say(line: str) -> None:
    """Print a line once."""
    if os.environ["RANK"] == "0":
        print(line, flush=True)


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=ROWS, help=f"some of: {', '.join(ROWS)}")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="8 layers of 512 are 25 million parameters")
    parser.add_argument("--context", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the drive to be measured")
    return parser.parse_args()


def main() -> None:
    args = options()
    import torch.distributed as dist

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    titles = "".join(f"{name + (', %' if name == 'ratio' else ', ms'):>24}" for name in COLUMNS)
    say(f"{dist.get_world_size()} ranks".ljust(16) + f"{titles}{'2 %':>9}")
    say(" " * 16 + f"{'median (quartiles)':>24}" * len(COLUMNS))
    kept = []
    for row in args.only or ROWS:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)
            kept.append(measure(args, row, Path(shared[0])))
            dist.barrier()
    if dist.get_rank() == 0:
        save(__file__, "saving", PAGE, kept)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
