"""Measure this machine. The only file that imports torch, psutil and zero-nvme-aio to do so."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PlanError
from .machine import KEYS, Machine, Value, measured_value
from .quantities import parse_quantity

if TYPE_CHECKING:
    import torch

REPETITIONS = 5
SECONDS = 2.0
"""How long the repetitions of one measurement may take; the one that is running then is the last."""
DISK_SECONDS = 30.0
"""How long a drive is measured, beyond the block that is moved then."""
MATRIX_SIDES = {"cpu": (512, 1024, 2048), "other": (2048, 8192)}
"""Rows and columns of the multiplied matrices, on the CPU and on accelerators: the fastest size counts."""
ATTENTION_SHAPES: dict[str, tuple[tuple[tuple[int, int, int, int], bool], ...]] = {
    "cpu": (((4, 12, 1024, 64), False), ((1, 8, 2048, 128), True)),
    "other": (((8, 16, 2048, 128), False), ((2, 16, 8192, 128), True)),
}
"""Batch, heads, tokens and head dimension of the measured attention, and whether it is causal, likewise."""
COPIED_BYTES = 256 << 20
BLOCK_BYTES = 16 << 20
"""Bytes of one read or write of a drive."""
BLOCKS_IN_TURN = 8
"""Blocks that are in flight at once, before the drive is measured the next way."""
SOURCE = f"zero-plan probe, best of up to {REPETITIONS}"


def probe(*, disk: str | None = None, disk_size: str = "1 GiB") -> Machine:
    """Measure this machine and return it, each rate as the best of up to five repetitions. It takes about a minute: a
    measurement that has taken its time is not repeated.

    Matrix products and fused attention per dtype, memory and copy bandwidth of the first accelerator, or of the CPU
    if there is none; its memory and the host's; the drives below the folder ``disk`` with a file of ``disk_size``,
    past the page cache if the file system allows it: a few blocks are written, read, and both at once, in turn,
    until the file has been passed five times or the time is over. Links, networks and endurance are not measured.
    Raises `PlanError` if a package is missing or the folder cannot be used.
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
    found |= _attention_rates(device)
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
    """Return the FLOP/s of matrix products on ``device``, by the machine's keys of the dtypes: of the fastest size.

    Sizes grow until a product would take too large a share of the time that a measurement has.
    """
    import torch

    sides = MATRIX_SIDES["cpu" if device.type == "cpu" else "other"]
    found = {}
    for key, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        rates: list[float] = []
        for side in sides:
            if rates and 2 * side**3 / rates[-1] > SECONDS / REPETITIONS:
                break
            left = torch.ones(side, side, dtype=dtype, device=device)
            out = torch.empty_like(left)
            seconds = _fastest_seconds(lambda left=left, out=out: torch.mm(left, left, out=out), device)  # type: ignore[misc]
            rates.append(2 * side**3 / seconds)
        found[f"device.{key}"] = max(rates)
    return found


def _attention_rates(device: torch.device) -> dict[str, float]:
    """Return the FLOP/s of fused attention on ``device``, by the machine's keys of the dtypes: of the fastest shape."""
    import torch

    shapes = ATTENTION_SHAPES["cpu" if device.type == "cpu" else "other"]
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return {
        f"device.attention_{key}": max(_attention_rate(shape, dtype, device, causal) for shape, causal in shapes)
        for key, dtype in dtypes.items()
    }


def _attention_rate(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, causal: bool) -> float:
    """Return the FLOP/s of fused attention over tensors of ``shape`` (batch, heads, tokens, head dimension), forward
    alone or with backward, whichever is faster; ``causal`` attention counts half.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    query, key, value = (torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    gradient = torch.ones(shape, dtype=dtype, device=device)

    def forward() -> torch.Tensor:
        """Run attention over the three tensors and return its result."""
        return scaled_dot_product_attention(query, key, value, is_causal=causal)

    def both() -> None:
        """Run attention forward and backward."""
        torch.autograd.grad(forward(), (query, key, value), gradient)

    batch, heads, tokens, width = shape
    product = 2 * batch * heads * tokens * tokens * width / (2 if causal else 1)
    return max(2 * product / _fastest_seconds(forward, device), 7 * product / _fastest_seconds(both, device))


def _memory_bandwidth(device: torch.device) -> float:
    """Return the bytes/s, read and written, at which ``device`` scales a tensor in place: the limit of an optimizer's
    update.
    """
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
    """Return the seconds of the fastest of up to `REPETITIONS` calls of ``work`` in `SECONDS`, after one call to warm
    up; each is measured until ``device`` has done its work.
    """
    import torch

    def synchronize() -> None:
        """Wait until ``device`` has done all queued work; do nothing on the CPU."""
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    work()
    synchronize()
    end = time.perf_counter() + SECONDS
    times: list[float] = []
    while not times or (len(times) < REPETITIONS and time.perf_counter() < end):
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def _disk_values(folder: Path, size: int) -> dict[str, float]:
    """Return capacity in bytes, read and write rates in bytes/s of the drives below ``folder``, by the machine's keys.

    ``size``: bytes of the file that is written and read, rounded down to `BLOCK_BYTES`, at least two of them. Raises
    `PlanError` if zero-nvme-aio is missing or the folder cannot be used.
    """
    try:
        import zero_nvme_aio
    except ImportError as error:
        raise PlanError(f"--disk needs {error.name}: pip install 'zero-plan[probe]'") from error
    with _scratch_file(folder) as path, zero_nvme_aio.Engine() as engine, engine.open(path, "rw") as file:
        drive = _Drive(engine, file, max(2, size // BLOCK_BYTES), time.perf_counter() + DISK_SECONDS)
        rates = drive.rates()
    return {"disk.capacity": shutil.disk_usage(folder).total, **rates}


class _Drive:
    """Measures the drive of a file.

    ``engine``: a `zero_nvme_aio.Engine`. ``file``: opened by it for reading and writing; the caller closes it.
    ``blocks``: the most blocks of `BLOCK_BYTES` in the file. ``end``: when to stop, a time of `time.perf_counter`. The
    file is passed in windows of a few blocks each.
    """

    def __init__(self, engine: Any, file: Any, blocks: int, end: float) -> None:
        self._engine, self._file, self._end = engine, file, end
        self._data = bytearray(os.urandom(1 << 20)) * (BLOCK_BYTES >> 20)
        self._into = bytearray(BLOCK_BYTES)
        self._windows = [range(at, min(at + BLOCKS_IN_TURN, blocks)) for at in range(0, blocks, BLOCKS_IN_TURN)]

    def rates(self) -> dict[str, float]:
        """Return the bytes/s of reading, of writing, and of both at once, by the machine's keys: of each the fastest of
        up to `REPETITIONS` passes over the file, or of as much of one pass as the time allowed.
        """
        self._write_file()
        best: dict[str, float] = {}
        for number in range(REPETITIONS):
            passed, whole = self._pass_once()
            if number and not whole:
                break
            for key, rate in passed.items():
                best[key] = max(rate, best.get(key, 0.0))
        return best

    def _write_file(self) -> None:
        """Write the file once before measuring, as drives allocate space on a first write. After a third of the time
        stop and make the file smaller, as the drive is slow.
        """
        end = self._end - 2 / 3 * DISK_SECONDS
        for number, window in enumerate(self._windows):
            _wait_for_all(self._write(window))
            if time.perf_counter() > end:
                self._windows = self._windows[: number + 1]
                return

    def _pass_once(self) -> tuple[dict[str, float], bool]:
        """Make one pass over the file, in which each window of blocks is written, read, and half of it written while
        the other half is read. Return (rates in bytes/s by the machine's keys, whether it came to the end of the file
        in time).
        """
        moved = dict.fromkeys(("disk.write", "disk.read", "disk.read_and_write"), 0)
        seconds = dict.fromkeys(moved, 0.0)
        for number, window in enumerate(self._windows):
            half = len(window) // 2
            ways: dict[str, Callable[[], list[Any]]] = {
                "disk.write": partial(self._write, window),
                "disk.read": partial(self._read, window),
                "disk.read_and_write": partial(self._write_and_read, window[:half], window[half:]),
            }
            for key, start in ways.items():
                begin = time.perf_counter()
                _wait_for_all(start())
                seconds[key] += time.perf_counter() - begin
                moved[key] += len(window) * BLOCK_BYTES
            if time.perf_counter() > self._end and number + 1 < len(self._windows):
                return {key: moved[key] / seconds[key] for key in moved}, False
        return {key: moved[key] / seconds[key] for key in moved}, True

    def _write(self, blocks: range) -> list[Any]:
        """Start to write the blocks with the numbers ``blocks``; return the pending requests."""
        return [self._engine.write(self._file, self._data, n * BLOCK_BYTES) for n in blocks]

    def _read(self, blocks: range) -> list[Any]:
        """Start to read the blocks with the numbers ``blocks``; return the pending requests."""
        return [self._engine.read(self._file, self._into, n * BLOCK_BYTES) for n in blocks]

    def _write_and_read(self, written: range, read: range) -> list[Any]:
        """Start to write the blocks with the numbers ``written`` and to read those with the numbers ``read``; return
        the pending requests.
        """
        return [*self._write(written), *self._read(read)]


def _wait_for_all(requests: list[Any]) -> None:
    """Wait until all ``requests`` to a drive, reads or writes, are done."""
    for request in requests:
        request.wait()


@contextmanager
def _scratch_file(folder: Path) -> Iterator[Path]:
    """Yield the path of a file for the block to create, in a temporary folder below ``folder`` that is removed
    afterwards. Raises `PlanError` if the system refuses anything in the block.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="zero-plan-probe-") as inside:
            yield Path(inside) / "data"
    except OSError as error:
        raise PlanError(f"--disk {folder}: cannot be used: {error}") from error


def _device_name(device: torch.device) -> str:
    """Return the name of ``device`` to show to the user, such as "CPU with 8 threads"."""
    import torch

    if device.type == "cpu":
        return f"CPU with {os.cpu_count()} threads"
    return str(torch.get_device_module(device).get_device_name(0))
