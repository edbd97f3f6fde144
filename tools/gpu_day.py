"""What to run on a machine with an accelerator: an ordered list of commands, each of at most nine minutes.

    python tools/gpu_day.py --list
    python tools/gpu_day.py --out results [NAME ...]

The machine needs no network: torch 2.11 or later, the packages' wheels for its Python with what they require, pytest
and hypothesis. Each command runs with this Python in the checkout's root and writes ``results/NAME.txt``: the command,
what it printed, its exit status and its seconds. The tests run beside one another first, then the measurements, each
alone. The exit status is the number of commands that failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 540
HOST = ("--tokens", "16", "--gbs", "0", "--steps", "5", "--warm-up", "10", "--who", "ours", "fsdp2")
OFFLOADED = '{"offload_optimizer": {"device": "cpu", "pin_memory": true}}'
WIDE = '{"stage3_prefetch_bucket_size": 1000000000, "reduce_bucket_size": 1000000000}'


@dataclass(frozen=True)
class Command:
    """``words`` follow the interpreter; ``variables`` are added to the environment; ``beside``: runs together with its
    neighbours that say so too."""

    name: str
    words: tuple[str, ...]
    seconds: int = LONGEST
    variables: tuple[tuple[str, str], ...] = ()
    beside: bool = False


def tests(name: str, *paths: str, options: tuple[str, ...] = (), **more: int) -> Command:
    words = (
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-c",
        "pyproject.toml",
        "--durations=8",
    )
    return Command(name, (*words, *options, *paths), beside=True, **more)


def link(name: str, *options: str, **more: int) -> Command:
    return Command(name, ("-W", "ignore", "tests-integration/bench_link.py", *options), **more)


COMMANDS = [
    *(tests(f"test-{name}", f"packages/zero-{name}/tests") for name in ("ckpt", "comm", "core", "nvme-aio", "offload")),
    tests("test-precision", "packages/zero-precision/tests"),
    tests("test-triton", "tests-integration/test_triton.py"),
    tests("test-engine", "tests-integration/test_accelerator.py", options=("-k", "not random_user_actions")),
    tests("test-actions", "tests-integration/test_accelerator.py", options=("-k", "random_user_actions")),
    Command(
        "sanitizer",
        ("-W", "ignore", "tests-integration/bench_link.py", "--shape", "tiny", "--who", "ours", "--steps", "3"),
        variables=(("TORCH_CUDA_SANITIZER", "1"),),
        beside=True,
    ),
    link("link-1b", "--shape", "1b", "--rows", "2", "--gbs", "100", "--stops"),
    link("link-1b-no-time", "--shape", "1b", "--rows", "2", "--gbs", "0"),
    link("link-1b-half", "--shape", "1b", "--rows", "2", "--gbs", "50"),
    link("link-1b-wide", "--shape", "1b", "--rows", "2", "--gbs", "100", "--who", "ours", "--zero", WIDE),
    link("link-8b-slice", "--shape", "8b-slice", "--gbs", "100", "--stops"),
    link("host-145", "--shape", "145 small layers", *HOST),
    link("host-577", "--shape", "577 small layers", *HOST),
    link("host-1153", "--shape", "1153 small layers", *HOST),
    link("offload-2", "--shape", "1b", "--gbs", "100", "--who", "ours", "--stage", "2", "--zero", OFFLOADED, "--stops"),
    link("offload-3", "--shape", "1b", "--gbs", "100", "--who", "ours", "--zero", OFFLOADED, "--stops"),
]


def run(command: Command, folder: Path) -> bool:
    """Run a command, write its file, print a line, and return whether it ended well."""
    words = [sys.executable, *command.words]
    began = time.monotonic()
    path = folder / f"{command.name}.txt"
    with path.open("w", encoding="utf-8") as file:
        print("$", " ".join(f"{name}={value}" for name, value in command.variables), *words, file=file, flush=True)
        process = subprocess.Popen(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **({"OMP_NUM_THREADS": "1"} if command.beside else {}), **dict(command.variables)},
        )
        try:
            status = str(process.wait(command.seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            status = f"killed after {command.seconds} s"
        took = time.monotonic() - began
        print(f"exit status {status}, {took:.0f} s", file=file)
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    print(f"== {command.name}: {status}, {took:.0f} s", *lines[-6:-1], sep="\n   ", flush=True)
    return status == "0"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="commands to run; all by default")
    parser.add_argument("--out", type=Path, default=Path("gpu-day"))
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    args = parser.parse_args()
    unknown = set(args.names) - {command.name for command in COMMANDS}
    if unknown:
        parser.error(f"no such command: {', '.join(sorted(unknown))}; see --list")
    chosen = [command for command in COMMANDS if not args.names or command.name in args.names]
    if args.list:
        for command in chosen:
            print(command.name, *command.words, sep="  ")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    together = [command for command in chosen if command.beside]
    failed = 0
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        failed += sum(not well for well in pool.map(lambda command: run(command, args.out), together))
    return failed + sum(not run(command, args.out) for command in chosen if not command.beside)


if __name__ == "__main__":
    sys.exit(main())
