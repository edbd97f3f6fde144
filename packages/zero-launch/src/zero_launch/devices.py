"""Count the ranks that this machine can run, within the bounds of an elastic job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

_COUNT = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"
_SECONDS = 120


def devices() -> int:
    """Return the number of accelerators of this machine, counted by a new process: torch caches the number in one that
    has counted before.

    Raises RuntimeError when the count fails or takes more than two minutes.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"the accelerators could not be counted: torch has not answered for {_SECONDS} s; --nproc N needs no count"
        ) from error
    if done.returncode:
        raise RuntimeError(f"the accelerators could not be counted: {done.stderr.strip()}")
    return int(done.stdout.split()[-1])


def ranks_within(elastic: tuple[int, int], count: int) -> int:
    """Return the number of ranks for ``count`` accelerators: one each, at most MAX of ``elastic`` = (MIN, MAX); MAX for
    0, as ranks then compute on the CPU. Raises ValueError for fewer accelerators than MIN, but not for 0."""
    least, most = elastic
    if count and count < least:
        raise ValueError(f"--elastic {least}:{most}: this machine has {count} accelerators, {least} are needed")
    return min(most, count) if count else most


def counter(elastic: tuple[int, int], first: int) -> Callable[[], int]:
    """Return a function to call before each attempt for its number of ranks.

    The function returns ``first`` for the first attempt, then one rank per accelerator by a new count, at most MAX of
    ``elastic`` = (MIN, MAX). It raises ValueError for fewer accelerators than MIN, and RuntimeError if they cannot be
    counted. On a machine that has no accelerators when `counter` is called it always returns ``first``.
    """
    import torch

    uses_devices = torch.accelerator.is_available()
    numbers = iter([first])

    def count() -> int:
        """Return the number of ranks of the next attempt; raises as `counter` says."""
        return next(numbers, None) or (ranks_within(elastic, devices()) if uses_devices else first)

    return count
