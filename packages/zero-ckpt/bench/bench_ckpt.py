"""Saving, loading and consolidating beside torch.save, torch DCP, DeepSpeed's script and fio, in one run.

    python bench_ckpt.py [--size-mib 1024] [--rounds 7] [--dir DIR] [--only save|load|consolidate|start]

Every round runs each contender once, in an order of its own, when the disk is idle; saving makes a fresh file, fsync
included, and reading drops the page cache first, which needs root. Printed are medians in seconds with the spread, and
the ratio to the peer of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp

from zero_ckpt import AsyncSaver, Interval, ReadRequest, convert, open_checkpoint, save_sharded
from zero_ckpt.direct import DirectSink, default_sink
from zero_ckpt.torch import Stager, tensor_buffer
from zero_ckpt.writer import BufferedSink, OpenSink

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from bench_results import save

COLUMNS = ("ratio", "median (least - most)", "aim")
PAGE = {
    ("zero-ckpt, nvme extra", "torch.save + fsync"): ("speed of saving, `nvme` extra / torch.save + fsync", ">= 2.5"),
    ("zero-ckpt, nvme extra", "torch DCP + fsync"): ("the same / torch DCP + fsync", ">= 2.5"),
    ("zero-ckpt, nvme extra", "fio write"): ("the same / fio's write", ">= 0.9"),
    ("zero-ckpt, ordinary files", "torch.save + fsync"): ("ordinary files / torch.save + fsync", ">= 1.3"),
    ("zero-ckpt async, blocking part", "torch.save + fsync"): (
        "blocked by a background save / torch.save + fsync",
        "<= 0.10",
    ),
    ("zero-ckpt", "torch.load(mmap=False)"): ("speed of loading into tensors / torch.load(mmap=False)", ">= 1.5"),
    ("zero-ckpt", "fio read"): ("the same / fio's read", ">= 0.9"),
    ("zero-ckpt, DeepSpeed's checkpoint", "DeepSpeed zero_to_fp32"): (
        "time to consolidate DeepSpeed's stage 3, 4 ranks / its zero_to_fp32",
        "<= 0.7",
    ),
}
"""(contender, peer) -> title on the page, and the aim: a least ratio of speeds or a most one of times."""
Rows = list[tuple[str, str, str]]
Contender = Callable[[Path], float]
T = TypeVar("T")
PARTS = ("save", "load", "start", "consolidate")


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def settle() -> None:
    """Let the disk finish what earlier contenders left behind."""
    os.sync()
    time.sleep(0.1)


def drop_cache() -> None:
    """Write back and forget the page cache."""
    settle()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def shuffled(contenders: dict[str, T]) -> list[tuple[str, T]]:
    """The contenders in a random order, so that none always follows the same other."""
    return random.sample(list(contenders.items()), len(contenders))


def fsync_tree(path: Path) -> None:
    """fsync a file, or every file of a directory."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())


def report(title: str, names: Iterable[str], rounds: list[dict[str, float]], peers: list[str]) -> Rows:
    """Print one table; return its rows of the page."""
    kept = []
    print(f"\n{title}")
    for name in names:
        times = [results[name] for results in rounds]
        line = f"  {name:34s} {statistics.median(times):7.3f} s  ({min(times):.3f} to {max(times):.3f})"
        for peer in peers:
            if name != peer:
                ratios = [results[peer] / results[name] for results in rounds]
                line += f"   {statistics.median(ratios):5.2f}x {peer} ({min(ratios):.2f} to {max(ratios):.2f})"
                if (name, peer) in PAGE:
                    what, aim = PAGE[name, peer]
                    shown = ratios if aim.startswith(">") else [1 / ratio for ratio in ratios]
                    kept.append((what, f"{statistics.median(shown):.2f} ({min(shown):.2f} - {max(shown):.2f})", aim))
        print(line)
    return kept


class Bench:
    """The tensors to save, and each contender."""

    def __init__(self, nbytes: int) -> None:
        self.tensors = {f"layer{n}.weight": torch.randn(4 << 20) for n in range(max(nbytes // (16 << 20), 1))}
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.saver = AsyncSaver()

    def intervals(self) -> list[Any]:
        stager = Stager()
        return [part for name, tensor in self.tensors.items() for part in stager.intervals(name, "param", tensor)]

    def torch_save(self, root: Path) -> float:
        def work() -> None:
            with (root / "model.pt").open("wb") as file:
                torch.save(self.tensors, file)
                file.flush()
                os.fsync(file.fileno())

        return timed(work)

    def dcp_save(self, root: Path) -> float:
        writer = dcp.FileSystemWriter(root / "dcp", sync_files=True)
        return timed(lambda: dcp.save(self.tensors, storage_writer=writer, no_dist=True))

    def ours(self, sink: OpenSink) -> Contender:
        return lambda root: timed(lambda: save_sharded(root, "ours", self.intervals(), step=1, open_sink=sink))

    def async_blocking(self, root: Path) -> float:
        seconds = timed(lambda: self.saver.save(root, "async", self.intervals(), step=1))
        self.saver.wait()
        return seconds

    def torch_load(self, root: Path, out: dict[str, torch.Tensor]) -> float:
        def work() -> None:
            for name, tensor in torch.load(root / "model.pt", mmap=False, weights_only=True).items():
                out[name].copy_(tensor)

        return timed(work)

    def our_load(self, root: Path, out: dict[str, torch.Tensor]) -> float:
        requests = [ReadRequest(name, "param", 0, tensor_buffer(tensor)) for name, tensor in out.items()]
        return timed(lambda: open_checkpoint(root, "ours").read_many(requests))

    def fio(self, root: Path, mode: str) -> float:
        """Seconds that fio takes to move as many bytes with direct I/O, fsync included."""
        command = ["fio", "--name=ckpt", f"--filename={root / 'fio'}", f"--rw={mode}", "--bs=1M", "--direct=1"]
        command += ["--ioengine=io_uring", "--iodepth=32", f"--size={self.nbytes}", "--end_fsync=1"]
        command += ["--output-format=json"]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return float(json.loads(out)["jobs"][0]["write" if mode == "write" else "read"]["runtime"]) / 1000


def bench_save(bench: Bench, directory: Path, rounds: int) -> Rows:
    """Save one whole state, several ways."""
    contenders: dict[str, Contender] = {
        "torch.save + fsync": bench.torch_save,
        "torch DCP + fsync": bench.dcp_save,
        "zero-ckpt, ordinary files": bench.ours(BufferedSink),
    }
    if default_sink() is DirectSink:
        contenders["zero-ckpt, nvme extra"] = bench.ours(DirectSink)
    contenders["zero-ckpt async, blocking part"] = bench.async_blocking
    contenders["fio write"] = lambda root: bench.fio(root, "write")
    results = []
    for _ in range(rounds + 1):  # the first warms up
        times = {}
        for name, contender in shuffled(contenders):
            root = Path(tempfile.mkdtemp(dir=directory))
            settle()
            times[name] = contender(root)
            shutil.rmtree(root)
        results.append(times)
    peers = ["torch.save + fsync", "torch DCP + fsync", "fio write"]
    return report(f"save {bench.nbytes >> 20} MiB", contenders, results[1:], peers)


def bench_load(bench: Bench, directory: Path, rounds: int) -> Rows:
    """Load into tensors that exist, from a cold cache."""
    root = Path(tempfile.mkdtemp(dir=directory))
    bench.torch_save(root)
    bench.ours(BufferedSink)(root)
    bench.fio(root, "write")
    out = {name: torch.zeros_like(tensor) for name, tensor in bench.tensors.items()}
    contenders: dict[str, Contender] = {
        "torch.load(mmap=False)": lambda root: bench.torch_load(root, out),
        "zero-ckpt": lambda root: bench.our_load(root, out),
        "fio read": lambda root: bench.fio(root, "read"),
    }
    results = []
    for _ in range(rounds):
        times = {}
        for name, contender in shuffled(contenders):
            drop_cache()
            times[name] = contender(root)
        results.append(times)
    if not all(torch.equal(out[name], tensor) for name, tensor in bench.tensors.items()):
        raise RuntimeError("what was loaded is not what was saved")
    shutil.rmtree(root)
    return report(f"load {bench.nbytes >> 20} MiB, cold", contenders, results, ["torch.load(mmap=False)", "fio read"])


MODEL = """
import os, deepspeed, torch
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(30)])
config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.backward(engine(torch.randn(1, WIDTH)).sum())
engine.step()
engine.save_checkpoint("ds", tag="t")
torch.distributed.barrier()
os._exit(0)
"""


def peak_and_time(command: list[str], directory: Path) -> tuple[float, float]:
    """Peak resident MiB and seconds of a process."""
    begin, peak = time.perf_counter(), 0.0
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status = Path("/proc", str(process.pid), "status")
    while process.poll() is None:  # rusage would count this process, of which it was forked
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                peak = max(peak, int(line.split()[1]) / 1024)
        time.sleep(0.005)
    if process.returncode:
        raise RuntimeError(f"{command} failed with status {process.returncode}")
    return peak, time.perf_counter() - begin


def bench_consolidate(directory: Path, nbytes: int, rounds: int) -> Rows:
    """One fp32 file of a stage-3 checkpoint of four ranks, of DeepSpeed's and of ours."""
    width = int((nbytes / 12 / 30) ** 0.5)
    (directory / "model.py").write_text(MODEL.replace("WIDTH", str(width)))
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", "model.py"]
    subprocess.run(launch, cwd=directory, check=True, capture_output=True)
    convert(directory / "ds", directory / "ours", to="zero-ckpt")
    theirs = [sys.executable, "ds/zero_to_fp32.py", "ds", "a", "--safe_serialization", "--max_shard_size", "100GB"]
    contenders = {
        "DeepSpeed zero_to_fp32": (theirs, "import deepspeed, safetensors.torch, huggingface_hub"),
        "zero-ckpt, DeepSpeed's checkpoint": (
            [sys.executable, "-m", "zero_ckpt", "convert", "ds", "b.safetensors"],
            "import torch, zero_ckpt.conversion.deepspeed",
        ),
        "zero-ckpt, its own checkpoint": (
            [sys.executable, "-m", "zero_ckpt", "convert", "ours", "c.safetensors"],
            "import zero_ckpt.cli, zero_ckpt.conversion.safetensors_sink",
        ),
        "zero-ckpt, its own, PyTorch file": (
            [sys.executable, "-m", "zero_ckpt", "convert", "ours", "d.bin"],
            "import torch, zero_ckpt.conversion.pytorch_sink",
        ),
    }
    base = {name: peak_and_time([sys.executable, "-c", line], directory)[0] for name, (_, line) in contenders.items()}
    results = []
    memory: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        times = {}
        for name, (command, _imports) in shuffled(contenders):
            drop_cache()
            peak, times[name] = peak_and_time(command, directory)
            memory[name].append(peak - base[name])
        results.append(times)
    title = f"consolidate a stage-3 checkpoint of {nbytes >> 20} MiB, largest tensor {4 * width**2 >> 20} MiB"
    kept = report(title, contenders, results, ["DeepSpeed zero_to_fp32"])
    for name, peaks in memory.items():
        ratio = max(peaks) / min(memory["DeepSpeed zero_to_fp32"])
        print(f"  {name:34s} at most {max(peaks):5.0f} MiB above imports  ({ratio:.2f} of DeepSpeed's)")
    ours, theirs_peak = max(memory["zero-ckpt, DeepSpeed's checkpoint"]), min(memory["DeepSpeed zero_to_fp32"])
    what = f"memory above imports for that: {ours:.0f} MiB / DeepSpeed's {theirs_peak:.0f} MiB"
    return [*kept, (what, f"{ours / theirs_peak:.2f}", "<= 0.35")]


def bench_start(directory: Path, rounds: int) -> None:
    """The commands on something tiny: how long they take to start."""
    root = directory / "tiny"
    save_sharded(root, "step1", [Interval("w", "param", (1000,), "F32", 0, bytes(4000))], step=1)
    ours, file = [sys.executable, "-m", "zero_ckpt"], str(root / "tiny.safetensors")
    convert(root, file)
    contenders = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "zero-ckpt inspect": [*ours, "inspect", str(root)],
        "zero-ckpt verify": [*ours, "verify", str(root)],
        "zero-ckpt convert, safetensors": [*ours, "convert", file, str(root / "copy.safetensors")],
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    }
    results = [
        {name: peak_and_time(command, directory)[1] for name, command in shuffled(contenders)} for _ in range(rounds)
    ]
    report("start", contenders, results, ["python -c 'import torch'"])


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    parts = {options.only} if options.only else set(PARTS)
    kept: Rows = []
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        if parts & {"save", "load"}:
            bench = Bench(options.size_mib << 20)
            if "save" in parts:
                kept += bench_save(bench, Path(name), options.rounds)
            if "load" in parts:
                kept += bench_load(bench, Path(name), options.rounds)
            bench.saver.close()
        if "start" in parts:
            bench_start(Path(name), 3 * options.rounds)
        if "consolidate" in parts and find_spec("deepspeed") is not None:
            kept += bench_consolidate(Path(name), options.size_mib << 20, min(options.rounds, 3))
        elif "consolidate" in parts:
            print("\nconsolidation is not measured: deepspeed is not installed")
    save(__file__, "ckpt", COLUMNS, kept)


if __name__ == "__main__":
    main()
