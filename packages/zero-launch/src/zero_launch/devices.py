"""Count the ranks that this machine can run, within the bounds of an elastic job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

_COUNT = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"
_SECONDS = 120


def devices() -> int:
    """The accelerators of this machine, counted by a fresh process: one that has counted before would repeat itself."""
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(f"the accelerators could not be counted: {done.stderr.strip()}")
    return int(done.stdout.split()[-1])


def ranks_within(elastic: tuple[int, int], count: int) -> int:
    """One rank per accelerator, at most MAX of ``elastic``; MAX where there are none and ranks compute on the CPU.

    Raises ValueError for fewer accelerators than MIN.
    """
    least, most = elastic
    if count and count < least:
        raise ValueError(f"--elastic {least}:{most}: this machine has {count} accelerators, {least} are needed")
    return min(most, count) if count else most


def counter(elastic: tuple[int, int], first: int) -> Callable[[], int]:
    """How many ranks to start, asked before each attempt: ``first``, then as many as there are accelerators for.

    Accelerators are not counted again where the first attempt did without.
    """
    import torch

    uses_devices = torch.accelerator.is_available()
    numbers = iter([first])

    def count() -> int:
        return next(numbers, None) or (ranks_within(elastic, devices()) if uses_devices else first)

    return count
