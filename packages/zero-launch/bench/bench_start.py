"""How long a job of two local ranks takes to start and to end, beside torchrun.

    python bench_start.py [--rounds 9] [--ranks 2]

Each round runs both launchers, in alternating order, on a script that notes when its first line ran and ends. Printed
are the time until the last rank's first line and the time until the command has ended, with the differences within
each round: median, lower and upper quartile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_SECONDS = 0.5
SCRIPT = "import os, time; open(f'first{os.environ[\"RANK\"]}', 'w').write(repr(time.time()))\n"
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node"],
    "zero-launch": ["zero_launch", "--quiet", "--nproc"],
}


def once(launcher: str, ranks: int) -> tuple[float, float]:
    """Seconds until the last rank's first line, and until the command has ended."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "noop.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", *LAUNCHERS[launcher], str(ranks), str(script)]
        begin = time.time()
        subprocess.run(command, check=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
        end = time.time()
        first = max(float((Path(folder) / f"first{rank}").read_text()) for rank in range(ranks))
    return first - begin, end - begin


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:6.3f} s  ({low:.3f} … {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in LAUNCHERS}
    for name in LAUNCHERS:
        once(name, args.ranks)  # warms the file cache
    for number in range(args.rounds):
        for name in list(LAUNCHERS)[:: 1 if number % 2 else -1]:
            samples[name].append(once(name, args.ranks))
    for index, what in enumerate(("first line of the last rank", "end of the command")):
        print(f"{what}, {args.ranks} ranks, {args.rounds} rounds")
        for name, rows in samples.items():
            print(f"  {name:12} {spread([row[index] for row in rows])}")
        pairs = zip(samples["zero-launch"], samples["torchrun"], strict=True)
        differences = [ours[index] - theirs[index] for ours, theirs in pairs]
        print(f"  difference   {spread(differences)}, wanted: at most {LIMIT_SECONDS} s")


if __name__ == "__main__":
    main()
