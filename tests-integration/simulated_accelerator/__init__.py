"""A simulated accelerator for tests: `load()` gives this process the device `sim`.

* Its memory is a fault for the host, as an accelerator's is.
* Streams are queues, each worked by a thread of its own with random delays; events come when a stream comes there.
* Every operator runs the CPU's kernel, later, in the current stream.
* `watch()` reports every stop of the host, every race and every collective, with files and lines of Python.

See docs/simulated-accelerator.md.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

from . import reports
from .build import native
from .device import NAME, DeviceModule
from .reports import Access, Launch, Line, Race, Report, Stop

__all__ = [
    "BACKEND",
    "Access",
    "Launch",
    "Line",
    "Race",
    "Report",
    "Stop",
    "configure",
    "host_access",
    "load",
    "settle",
    "watch",
]

BACKEND = "simulated"
"""The process group backend of the device."""
_PLUMBING = [contextlib.__file__, functools.__file__, threading.__file__, typing_extensions.__file__]


@functools.cache
def load() -> Any:
    """Give this process the device; return the compiled module. A second call does nothing."""
    torch.utils.rename_privateuse1_backend(NAME)
    module = native()
    module.pass_over([str(Path(torch.__file__).parent), str(Path(__file__).parent), *_PLUMBING])
    torch._register_device_module(NAME, DeviceModule(module))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(BACKEND, _group, devices=[NAME])
    atexit.register(module.close)
    return module


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return load().make_group(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)


def configure(
    *,
    seed: int | None = None,
    longest_delay: int | None = None,
    devices: int | None = None,
    capacity: int | None = None,
    raise_on_stop: bool | None = None,
) -> None:
    """Change the device's settings; None leaves one as it is.

    ``seed``: of the streams' delays, 0 for none; ``longest_delay`` of an operation, in microseconds; ``devices`` of
    this process; ``capacity`` of each in bytes; ``raise_on_stop``: a stop of the host raises RuntimeError.
    """
    module = load()
    for name, value in {
        "seed": seed,
        "longest_delay": longest_delay,
        "devices": devices,
        "capacity": capacity,
        "raise_on_stop": raise_on_stop,
    }.items():
        if value is not None:
            getattr(module, f"set_{name}")(value)


def settle() -> None:
    """Wait for all streams without counting as a stop of the host. Raises RuntimeError if an operation failed."""
    load().drain()


def host_access(tensor: torch.Tensor, *, write: bool) -> None:
    """Say that the host reads or writes pinned memory here, where no operator of torch does so."""
    load().host_access(tensor, write)


@contextlib.contextmanager
def watch() -> Iterator[Report]:
    """Return a context that checks for races and collects what happens; its report is filled at the end."""
    module = load()
    module.drain()
    module.take_stops()
    module.take_launches()
    module.check(True)
    report = Report([], [], [])
    try:
        yield report
    finally:
        report.stops += reports.stops(module.take_stops())
        report.launches += [Launch(*told) for told in module.take_launches()]
        module.drain()
        report.races += reports.races(module.races())
        module.check(False)
