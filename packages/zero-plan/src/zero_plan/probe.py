"""Measure this machine. The only file that imports torch, psutil and zero-nvme-aio to do so."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PlanError
from .machine import KEYS, Machine, Value, measured_value
from .quantities import parse_quantity

if TYPE_CHECKING:
    import torch

REPETITIONS = 5
MATRIX_SIDE = {"cpu": 2048, "other": 8192}
"""Rows and columns of the multiplied matrices, on the CPU and on accelerators."""
COPIED_BYTES = 256 << 20
BLOCK_BYTES = 64 << 20
"""Bytes of one read or write of a drive."""
SOURCE = "zero-plan probe, best of 5"


def probe(*, disk: str | None = None, disk_size: str = "1 GiB") -> Machine:
    """Measure this machine and return it, each rate as the best of five repetitions.

    Matrix products per dtype, memory and copy bandwidth of the first accelerator, or of the CPU if there is none; its
    memory and the host's; the drives below the folder ``disk`` with a file of ``disk_size``, past the page cache if the
    file system allows it. Links, networks and endurance are not measured. Raises `PlanError` if a package is missing or
    the folder cannot be used.
    """
    size = parse_quantity(disk_size, "bytes", "--disk-size")
    try:
        import psutil
        import torch
    except ImportError as error:
        raise PlanError(f"probing needs {error.name}: pip install 'zero-plan[probe]'") from error
    found: dict[str, float] = {"node.host_memory": psutil.virtual_memory().total}
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        device = torch.device("cpu")
        found["node.devices"] = 1
        found["device.memory"] = found["node.host_memory"]
    else:
        found["node.devices"] = torch.accelerator.device_count()
        found["device.memory"] = torch.get_device_module(device).get_device_properties(0).total_memory
        found |= _copy_rates(device)
    found |= _matrix_rates(device)
    found["device.memory_bandwidth"] = _memory_bandwidth(device)
    found["node.host_memory_bandwidth"] = _memory_bandwidth(torch.device("cpu"))
    if disk is not None:
        found |= _disk_values(Path(disk), int(size))
    values = {}
    for key in KEYS:
        if key in found:
            text = str(measured_value(found[key], key, SOURCE)["value"])
            values[key] = Value(parse_quantity(text, KEYS[key][0], key), text, SOURCE)
    return Machine(f"{os.uname().nodename}, {found['node.devices']:.0f} × {_device_name(device)}", values)


def _matrix_rates(device: torch.device) -> dict[str, float]:
    """Return the FLOP/s of matrix products, by the machine's keys of the dtypes."""
    import torch

    side = MATRIX_SIDE["cpu" if device.type == "cpu" else "other"]
    found = {}
    for key, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        left = torch.ones(side, side, dtype=dtype, device=device)
        out = torch.empty_like(left)
        seconds = _fastest_seconds(lambda left=left, out=out: torch.mm(left, left, out=out), device)  # type: ignore[misc]
        found[f"device.{key}"] = 2 * side**3 / seconds
    return found


def _memory_bandwidth(device: torch.device) -> float:
    """Return the bytes/s, read and written, of scaling a tensor in place: the limit of an optimizer's update."""
    import torch

    values = torch.ones(COPIED_BYTES // 4, device=device)
    return 2 * COPIED_BYTES / _fastest_seconds(lambda: values.mul_(1.0), device)


def _copy_rates(device: torch.device) -> dict[str, float]:
    """Return the bytes/s of copies between pinned host memory and ``device``, by the machine's keys."""
    import torch

    host = torch.ones(COPIED_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=device)
    return {
        "node.host_to_device": COPIED_BYTES / _fastest_seconds(lambda: there.copy_(host, non_blocking=True), device),
        "node.device_to_host": COPIED_BYTES / _fastest_seconds(lambda: host.copy_(there, non_blocking=True), device),
    }


def _fastest_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of the fastest of `REPETITIONS` calls of ``work``, after one call to warm up; each is measured
    until ``device`` has done its work.
    """
    import torch

    def synchronize() -> None:
        """Wait for the device's work; do nothing on the CPU."""
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    work()
    times = []
    for _ in range(REPETITIONS):
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def _disk_values(folder: Path, size: int) -> dict[str, float]:
    """Return capacity in bytes, read and write rates in bytes/s of the drives below ``folder``, by the machine's keys.

    ``size``: bytes of the file that is written and read, rounded down to `BLOCK_BYTES`, at least one. Raises
    `PlanError` if zero-nvme-aio is missing or the folder cannot be used.
    """
    try:
        import zero_nvme_aio
    except ImportError as error:
        raise PlanError(f"--disk needs {error.name}: pip install 'zero-plan[probe]'") from error
    blocks = max(1, size // BLOCK_BYTES)
    data = bytearray(os.urandom(1 << 20)) * (BLOCK_BYTES >> 20)
    with _scratch_file(folder) as path, zero_nvme_aio.Engine() as engine:
        writes, reads, both = [], [], []
        with engine.open(path, "rw") as file:

            def write() -> list[Any]:
                return [engine.write(file, data, n * BLOCK_BYTES) for n in range(blocks)]

            def read(into: bytearray) -> list[Any]:
                return [engine.read(file, into, n * BLOCK_BYTES) for n in range(blocks)]

            apart = bytearray(BLOCK_BYTES)
            for _ in range(REPETITIONS):
                writes.append(_timed_seconds(write))
                reads.append(_timed_seconds(lambda: read(data)))
                both.append(
                    _timed_seconds(lambda: [r for pair in zip(write(), read(apart), strict=True) for r in pair])
                )
    total = blocks * BLOCK_BYTES
    return {
        "disk.capacity": shutil.disk_usage(folder).total,
        "disk.read": total / min(reads),
        "disk.write": total / min(writes),
        "disk.read_and_write": 2 * total / min(both),
    }


def _timed_seconds(start: Callable[[], list[Any]]) -> float:
    """Return the seconds until all requests that ``start`` returns are done."""
    begin = time.perf_counter()
    for request in start():
        request.wait()
    return time.perf_counter() - begin


@contextmanager
def _scratch_file(folder: Path) -> Iterator[Path]:
    """Yield the path of a file to create in a temporary folder below ``folder``, which is removed afterwards. Raises
    `PlanError` if the system refuses anything in the block.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="zero-plan-probe-") as inside:
            yield Path(inside) / "data"
    except OSError as error:
        raise PlanError(f"--disk {folder}: cannot be used: {error}") from error


def _device_name(device: torch.device) -> str:
    """Return a name of ``device`` for people."""
    import torch

    if device.type == "cpu":
        return f"CPU with {os.cpu_count()} threads"
    return str(torch.get_device_module(device).get_device_name(0))
