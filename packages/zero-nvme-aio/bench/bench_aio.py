"""zero-nvme-aio beside fio and DeepSpeed's async_io, on one file, in one run, interleaved.

python bench_aio.py [--path FOLDER] [--size BYTES] [--repeats N]

Prints speeds, processor time and ratios, each as the median over repetitions with its least and most; asserts nothing.
Needs both peers: `fio` on the path, and `deepspeed` (with its async_io extension buildable: libaio headers, ninja)
installed. Exit status 2 when a peer is missing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from zero_nvme_aio import AioError, AlignedBuffer, Engine, File, Request, _fio, measure
from zero_nvme_aio._async_io import AsyncIo
from zero_nvme_aio.measure import Sample

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from bench_results import save

COLUMNS = ("ratio", "read", "write", "aim")
FIO_POINTS = [
    (engine, block, depth) for engine in _fio.ENGINES for block, depth in ((131072, 128), (1 << 20, 32), (4 << 20, 8))
]
KINDS = ("read", "write")
Results = dict[tuple[str, str], list[Sample]]


def missing_peers() -> list[str]:
    """What cannot be compared with, and why."""
    missing = [] if _fio.available() else ["fio is not installed"]
    try:
        AsyncIo(1 << 20, 1 << 20, 1)
    except AioError as error:
        missing.append(str(error))
    return missing


class Contenders:
    """Everything that moves the file, over memory that is held for the whole run."""

    def __init__(self, path: str, nbytes: int) -> None:
        import torch

        self.path, self.nbytes = path, nbytes
        self.io = Engine()
        self.file = self.io.open(path, "rw")
        peer = AsyncIo(nbytes, 1 << 20, 32)
        plain = torch.ones(nbytes, dtype=torch.uint8)
        self.actions: dict[tuple[str, str], Callable[[], Sample]] = {}
        self.aligned = AlignedBuffer(nbytes)
        ours = {"aligned": self.aligned, "torch": plain, "numpy": plain.numpy()}
        for name, memory in ours.items():
            self.actions[f"ours {name}", "read"] = partial(self.own, self.io.read, memory)
            self.actions[f"ours {name}", "write"] = partial(self.own, self.io.write, memory)
        for name, tensor in {"pinned": peer.pinned(), "unpinned": plain}.items():
            for kind in KINDS:
                self.actions[f"DeepSpeed {name}", kind] = partial(peer.run, kind, path, tensor)

    def own(self, move: Callable[[File, Any, int], Request], memory: Any) -> Sample:
        """One transfer of the whole file by the engine."""
        return measure.measure(lambda: move(self.file, memory, 0).wait())

    def round(self) -> Iterator[tuple[tuple[str, str], Sample]]:
        """Every contender once."""
        for kind in KINDS:
            for (name, own_kind), action in self.actions.items():
                if own_kind == kind:
                    yield (name, kind), action()
            for engine, block, depth in FIO_POINTS:
                sample = _fio.run(kind, self.path, self.nbytes, engine, block, depth)
                yield (f"fio {engine} {block >> 10}K", kind), sample


def run(folder: str, nbytes: int, repeats: int) -> tuple[Results, list[tuple[float, float]], list[float]]:
    """All samples; (seconds alone, seconds beside a read) of a NumPy loop; seconds to submit the whole file."""
    results: Results = {}
    with Engine() as io:
        path = measure.file_for_bench(io, folder, nbytes, AlignedBuffer(min(nbytes, 64 << 20)))
    try:
        contenders = Contenders(path, nbytes)
        for number in range(repeats + 1):
            for key, sample in contenders.round():
                if number > 0:
                    results.setdefault(key, []).append(sample)
        loops, submits = beside_numpy(contenders, repeats)
    finally:
        os.unlink(path)
    return results, loops, submits


def beside_numpy(contenders: Contenders, repeats: int) -> tuple[list[tuple[float, float]], list[float]]:
    """What a NumPy loop pays while the file is read, and what submitting costs."""
    import numpy

    matrix = numpy.random.default_rng(0).random((192, 192))

    def loop(until: Callable[[], bool]) -> float:
        count, start = 0, time.perf_counter()
        while not until():
            numpy.sqrt(matrix * matrix + 1.0).sum()
            count += 1
        return (time.perf_counter() - start) / max(count, 1)

    pairs, submits = [], []
    for number in range(3 * repeats + 1):
        start = time.perf_counter()
        request = contenders.io.read(contenders.file, contenders.aligned, 0)
        submitted = time.perf_counter() - start
        beside = loop(request.done)
        deadline = time.perf_counter() + 0.3
        alone = loop(lambda end=deadline: time.perf_counter() > end)
        if number > 0:
            submits.append(submitted)
            pairs.append((alone, beside))
    return pairs, submits


def ratios(over: list[float], under: list[float]) -> str:
    """Ratio of medians, and the spread of the ratios of the repetitions."""
    each = sorted(a / b for a, b in zip(over, under, strict=True))
    return f"{statistics.median(over) / statistics.median(under):6.2f} ({each[0]:.2f}-{each[-1]:.2f})"


def speeds(samples: list[Sample]) -> list[float]:
    return [sample.gb_per_s for sample in samples]


def costs(samples: list[Sample]) -> list[float]:
    return [max(sample.cpu_s_per_gb, 1e-6) for sample in samples]


def report(results: Results, loops: list[tuple[float, float]], submits: list[float]) -> None:
    """Prints the table and the ratios that the project holds itself to."""
    print(f"{'':<24}{'':<7}{'GB/s':>7}  {'least-most':<13}{'CPU s/GB':>9}")
    for (name, kind), samples in sorted(results.items(), key=lambda item: (item[0][1], item[0][0])):
        middle = measure.median(samples)
        spread = f"{min(speeds(samples)):.2f}-{max(speeds(samples)):.2f}"
        print(f"{name:<24}{kind:<7}{middle.gb_per_s:7.2f}  {spread:<13}{middle.cpu_s_per_gb:9.4f}")
    print(f"\n{'ratio':<62}{'median':>6} {'(least-most)':<14} wanted")
    kept: dict[str, list[str]] = {}
    for kind in KINDS:
        of_kind = {name: samples for (name, own), samples in results.items() if own == kind}
        for what, ratio, goal in ratios_of_kind(of_kind):
            line(f"{kind}: {what}", ratio, goal)
            kept.setdefault(f"{what.partition(' (')[0]}|{goal}", []).append(ratio.strip())
    rows = [
        (what, *found, goal) for (what, _, goal), found in ((key.partition("|"), found) for key, found in kept.items())
    ]
    save(__file__, "aio", COLUMNS, rows)
    alone, beside = zip(*loops, strict=True)
    line("a NumPy loop beside the read / alone", ratios(list(beside), list(alone)), "<= 1.10")
    milliseconds = [1e3 * seconds for seconds in submits]
    middle, least, most = statistics.median(milliseconds), min(milliseconds), max(milliseconds)
    line("milliseconds to submit the whole file", f"{middle:6.3f} ({least:.3f}-{most:.3f})", "< 1")


def ratios_of_kind(results: dict[str, list[Sample]]) -> Iterator[tuple[str, str, str]]:
    """Yield what is compared, the ratio and the aim: of reading, or of writing."""
    fio = {name: samples for name, samples in results.items() if name.startswith("fio")}
    best = max(fio, key=lambda name: statistics.median(speeds(fio[name])))
    frugal = min((name for name in fio if "libaio" in name), key=lambda name: statistics.median(costs(fio[name])))
    goals = (("aligned", "1.0", "0.5"), ("torch", "0.90", "1.5"), ("numpy", "0.90", "1.5"))
    for memory, speed_goal, cost_goal in goals:
        own = results[f"ours {memory}"]
        yield f"{memory} / best of fio ({best[4:]})", ratios(speeds(own), speeds(fio[best])), f">= {speed_goal}"
        cost = ratios(costs(own), costs(fio[frugal]))
        yield f"{memory} CPU / least CPU of fio's libaio ({frugal[4:]})", cost, f"<= {cost_goal}"
    pinned, unpinned = speeds(results["DeepSpeed pinned"]), speeds(results["DeepSpeed unpinned"])
    yield "aligned / DeepSpeed pinned", ratios(speeds(results["ours aligned"]), pinned), ">= 1.0"
    yield "torch / DeepSpeed unpinned", ratios(speeds(results["ours torch"]), unpinned), ">= 2.0"


def line(what: str, ratio: str, goal: str) -> None:
    print(f"{what:<62}{ratio:<22} {goal}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=None, help="a folder on the device to measure (default: a temporary one)")
    parser.add_argument("--size", type=int, default=1 << 30)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    missing = missing_peers()
    if missing:
        print("\n".join(missing), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        report(*run(str(Path(folder)), options.size, options.repeats))
    return 0


if __name__ == "__main__":
    sys.exit(main())
