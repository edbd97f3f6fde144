"""The offloaded step over two drives of different speed, beside one of them alone.

    python bench_paths.py [--elements N] [--folder PATH] [--rounds N] [--fast MB] [--slow MB] [--slower MB]

The drives are two file systems in images below ``--folder``, whose bandwidth the kernel limits, for reads and for
writes each: ``--fast`` and ``--slow`` MB/s (1e6 bytes). Rows: the fast drive alone; both with equal shares; both with
shares as measured at the start; and the last steps of the latter while the slow drive has only ``--slower`` MB/s. The
ratio is to the fast drive alone; beside it is the ratio of the bandwidths, which none can exceed. It needs root, loop
devices and the blkio controller (cgroup version 1).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

BLKIO = Path("/sys/fs/cgroup/blkio")
TENSOR = 1 << 20
LATER_STEPS = 6  # after the slow drive became slower, before those that are measured


class Row(NamedTuple):
    """One line: its name, the seconds of each step, and the share of the bytes that the slow drive got at the end."""

    name: str
    seconds: list[float]
    share: float


class Drive(NamedTuple):
    """A mounted file system and the number of its device, as the kernel writes it."""

    folder: Path
    device: str


@contextmanager
def drive(folder: Path, name: str, nbytes: int) -> Iterator[Drive]:
    """Make and mount a file system of ``nbytes`` in an image; unmount it at the end."""
    image, place = folder / f"{name}.image", folder / name
    with image.open("wb") as file:
        file.truncate(nbytes)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        number = os.stat(place).st_dev
        yield Drive(place, f"{os.major(number)}:{os.minor(number)}")
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def control_group() -> Iterator[Path]:
    """Make a control group for the processes that are measured."""
    group = BLKIO / f"zero-bench-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        group.rmdir()


def limit(group: Path, device: str, megabytes: float) -> None:
    """Limit what the group reads and what it writes on a device, each, to ``megabytes`` per second."""
    for way in ("read", "write"):
        (group / f"blkio.throttle.{way}_bps_device").write_text(f"{device} {int(megabytes * 1e6)}")


def steps(group: str, paths: Any, elements: int, rounds: int, slower: tuple[str, float] | None, said: Any) -> None:
    """In a process of its own, inside the group: time ``rounds`` steps, after one of ``slower`` if it is given, which
    is a device and its new limit; send the seconds and the share of the last path through ``said``.
    """
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    import torch
    from torch import nn

    from zero_offload import OffloadedOptimizer

    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(TENSOR).to(torch.bfloat16)) for _ in range(elements // TENSOR)]
    for param in params:
        param.grad = torch.randn(TENSOR).to(torch.bfloat16)
    with OffloadedOptimizer(params, "AdamW", lr=1e-4, tier="nvme", path=paths, sub_group_size=4 * TENSOR) as optimizer:

        def seconds() -> float:
            start = time.perf_counter()
            optimizer.step()
            optimizer.flush()
            return time.perf_counter() - start

        for _ in range(2):  # the first writes only
            seconds()
        if slower is not None:
            limit(Path(group), *slower)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(LATER_STEPS):
                    seconds()
        found = [seconds() for _ in range(rounds)]
        share = optimizer.path_use()[-1].share
    (BLKIO / "cgroup.procs").write_text(str(os.getpid()))
    said.send((found, share))


def measured(
    name: str, group: Path, paths: Any, args: argparse.Namespace, slower: tuple[str, float] | None = None
) -> Row:
    """Return a row, timed in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=steps, args=(str(group), paths, args.elements, args.rounds, slower, there))
    process.start()
    there.close()
    seconds, share = here.recv()
    process.join()
    return Row(name, seconds, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on a drive that is faster than both limits together")
    parser.add_argument("--fast", type=float, default=200.0)
    parser.add_argument("--slow", type=float, default=120.0)
    parser.add_argument("--slower", type=float, default=25.0)
    args = parser.parse_args()
    if os.geteuid() != 0 or not (BLKIO / "cgroup.procs").exists():
        print("skipped: limiting a drive needs root and the blkio controller of cgroup version 1")
        return
    from zero_offload.swap_paths import SwapPaths

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder or Path(__file__).parent)))
        nbytes = max(512 << 20, 4 * 12 * args.elements)
        fast, slow = (stack.enter_context(drive(folder, name, nbytes)) for name in ("fast", "slow"))
        group = stack.enter_context(control_group())
        limit(group, fast.device, args.fast)
        limit(group, slow.device, args.slow)
        both = (str(fast.folder), str(slow.folder))
        rows = [
            measured("the fast drive alone", group, str(fast.folder), args),
            measured("both, equal shares", group, SwapPaths(both, (1.0, 1.0)), args),
            measured("both, as measured", group, SwapPaths(both), args),
            measured("both, the slow one slower", group, SwapPaths(both), args, (slow.device, args.slower)),
        ]
    base = statistics.median(rows[0].seconds)
    bounds = [1.0, 2 * args.slow / args.fast, 1 + args.slow / args.fast, 1 + args.slower / args.fast]
    print(f"{args.elements} elements, {12 * args.elements / 1e6:.0f} MB of states read and written in each step")
    print(f"{'':28}{'s/step':>8}{'spread':>14}{'x one drive':>13}{'bandwidth':>11}{'slow drive':>12}")
    for row, bound in zip(rows, bounds, strict=True):
        middle = statistics.median(row.seconds)
        spread = f"{min(row.seconds):.2f}-{max(row.seconds):.2f}"
        share = "" if row is rows[0] else f"{row.share:.0%}"
        print(f"{row.name:28}{middle:8.2f}{spread:>14}{base / middle:13.2f}{bound:11.2f}{share:>12}")


if __name__ == "__main__":
    main()
