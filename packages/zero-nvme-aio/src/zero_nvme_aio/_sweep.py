"""The measurements of `zero-nvme-aio bench`: every setting of the engine, beside other tools (peers), in rounds."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from . import _async_io, _fio, measure
from ._engine import Engine
from ._memory import AlignedBuffer
from .measure import Sample, Setting

__all__ = ["Peers", "Row", "points", "save_plot", "sweep", "table"]


class Row(NamedTuple):
    """One line of the result: ``who`` (the label of a setting or a peer), the kind of its memory ("aligned" or
    "plain"), block size, queue depth, kind of load ("read", "write" or "mixed"), and the samples.
    """

    who: str
    memory: str
    block_bytes: int
    queue_depth: int
    kind: str
    samples: list[Sample]


class Peers(NamedTuple):
    """Which peers are measured beside the engine: fio, and DeepSpeed's async_io."""

    fio: bool = False
    deepspeed: bool = False


def points(
    backends: Sequence[str],
    blocks: Sequence[int],
    depths: Sequence[int],
    threads: Sequence[int],
    memories: Sequence[str],
    direct: bool,
) -> list[Setting]:
    """Return a setting for every combination of backend, block size (bytes), queue depth, number of threads and memory;
    `direct` holds for all.
    """
    return [
        Setting(backend, block, depth, count, memory, direct)
        for backend, block, depth, count, memory in itertools.product(backends, blocks, depths, threads, memories)
    ]


def sweep(
    folder: str,
    settings: Sequence[Setting],
    kinds: Sequence[str],
    nbytes: int,
    repeats: int,
    peers: Peers,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Measure every setting and peer `repeats` times, interleaved, after one warm-up round; return a row for each, with
    its samples.

    A scratch file of `nbytes` is made in `folder` and removed. `kinds`: "read", "write" or "mixed", which peers do not
    do. `progress` is called after each measurement, with 1 and the number of all of them.
    """
    memories: dict[str, Any] = {"aligned": memoryview(AlignedBuffer(nbytes))}
    if any(setting.memory == "plain" for setting in settings):
        memories["plain"] = measure.plain_memory(nbytes)
    with Engine() as io:
        path = measure.file_for_bench(io, folder, nbytes, memories["aligned"])
    contenders: list[tuple[Row, Callable[[], Sample]]] = [
        (
            Row(_label(setting), setting.memory, setting.block_bytes, setting.queue_depth, kind, []),
            partial(measure_once, setting, kind, path, memories[setting.memory], nbytes),
        )
        for setting, kind in itertools.product(settings, kinds)
    ]
    try:
        contenders += _peer_measurements(
            peers, path, settings, [kind for kind in kinds if kind != "mixed"], nbytes, memories
        )
        for round_number in range(repeats + 1):
            for row, action in contenders:
                sample = action()
                if round_number > 0:
                    row.samples.append(sample)
                if progress is not None:
                    progress(1, len(contenders) * (repeats + 1))
    finally:
        os.unlink(path)
    return [row for row, _ in contenders]


def _label(setting: Setting) -> str:
    """Return the name of a setting in the table: backend, threads, and memory, or "buffered"."""
    return f"{setting.backend} x{setting.threads} {setting.memory if setting.direct else 'buffered'}"


def _peer_measurements(
    peers: Peers,
    path: str,
    settings: Sequence[Setting],
    kinds: Sequence[str],
    nbytes: int,
    memories: Mapping[str, memoryview],
) -> Iterator[tuple[Row, Callable[[], Sample]]]:
    """Yield, for each peer asked for, each kind of load, and each block size and depth in `settings`, an empty row and
    the function that measures it once. `path`: the file of `nbytes` to be read and written. `memories`: memory of
    `nbytes` by kind, "aligned" and, if a setting uses it, "plain".
    """
    shapes = sorted({(setting.block_bytes, setting.queue_depth) for setting in settings})
    for (block, depth), kind in itertools.product(shapes, kinds):
        for engine in _fio.ENGINES if peers.fio else ():
            row = Row(f"fio {engine}", "aligned", block, depth, kind, [])
            yield row, partial(_fio.run, kind, path, nbytes, engine, block, depth)
    if not peers.deepspeed:
        return
    for block, depth in shapes:
        async_io = _async_io.AsyncIo(nbytes, block, depth)
        pinned = async_io.pinned()
        for kind in kinds:
            yield Row("DeepSpeed pinned", "aligned", block, depth, kind, []), partial(async_io.run, kind, path, pinned)
        if "plain" in memories:
            plain = async_io.unpinned(memories["plain"])
            for kind in kinds:
                yield (
                    Row("DeepSpeed unpinned", "plain", block, depth, kind, []),
                    partial(async_io.run, kind, path, plain),
                )


def measure_once(setting: Setting, kind: str, path: str, memory: memoryview, nbytes: int) -> Sample:
    """Measure one transfer of the whole file of `nbytes` at `path` with an engine of this setting, from or to `memory`.
    `kind`: "read", "write", or "mixed", which reads one half while it writes the other.
    """
    with setting.engine() as io, io.open(path, "rw", direct="auto" if setting.direct else False) as file:
        # Every progress thread gets its staging ring before the clock starts.
        io.read(file, memory[: min(nbytes, 4 * setting.block_bytes * setting.threads)], 0).wait()
        if kind == "read":
            return measure.measure(lambda: io.read(file, memory, 0).wait())
        if kind == "write":
            return measure.measure(lambda: io.write(file, memory, 0).wait())
        half = nbytes // 2 // 4096 * 4096

        def mixed() -> int:
            """Read the first half of the file while the second half is written; return the bytes of both."""
            reading = io.read(file, memory[:half], 0)
            writing = io.write(file, memory[half:], half)
            return reading.wait() + writing.wait()

        return measure.measure(mixed)


def table(rows: Sequence[Row]) -> Any:
    """Return a rich table of the rows, fastest first within each kind of load.

    The ratios are to the fastest fio row of the same kind, to the lowest processor time of its libaio rows, and to
    DeepSpeed's fastest row with the same kind of memory.
    """
    from rich.table import Table

    with_fio = any(row.who.startswith("fio") for row in rows)
    with_deepspeed = any(row.who.startswith("DeepSpeed") for row in rows)
    out = Table(title="GB/s, median (least to most); 1 GB = 1e9 bytes")
    columns = ["", "block", "depth", "kind", "GB/s", "spread", "CPU s/GB"]
    columns += ["x best fio", "x libaio CPU"] if with_fio else []
    columns += ["x DeepSpeed"] if with_deepspeed else []
    for column in columns:
        out.add_column(column, justify="left" if column in ("", "kind") else "right", no_wrap=column == "")
    for row in sorted(rows, key=lambda r: (r.kind, -measure.median(r.samples).gb_per_s)):
        middle = measure.median(row.samples)
        speeds = [sample.gb_per_s for sample in row.samples]
        own = [other for other in rows if other.kind == row.kind]
        libaio = [measure.median(r.samples).cpu_s_per_gb for r in own if r.who == "fio libaio"]
        deepspeed = _median_speeds([r for r in own if r.memory == row.memory], "DeepSpeed")
        cells = [row.who, _format_size(row.block_bytes), str(row.queue_depth), row.kind, f"{middle.gb_per_s:.2f}"]
        cells += [f"{min(speeds):.2f}-{max(speeds):.2f}", f"{middle.cpu_s_per_gb:.4f}"]
        if with_fio:
            cells += [
                _ratio(middle.gb_per_s, _median_speeds(own, "fio"), max),
                _ratio(middle.cpu_s_per_gb, libaio, min),
            ]
        if with_deepspeed:
            cells.append(_ratio(middle.gb_per_s, deepspeed, max))
        out.add_row(*cells)
    return out


def _ratio(value: float, peers: list[float], best: Callable[[list[float]], float]) -> str:
    """Return the ratio of `value` to the `best` (`max` or `min`) of the values of `peers`, as text; empty if there are
    no peers (a mixed load), or if their best is 0.
    """
    return f"{value / best(peers):.2f}" if peers and best(peers) > 0 else ""


def _median_speeds(rows: Sequence[Row], who: str) -> list[float]:
    """Return the median GB/s of the rows whose label begins with `who`."""
    return [measure.median(row.samples).gb_per_s for row in rows if row.who.startswith(who)]


def save_plot(rows: Sequence[Row], path: str) -> None:
    """Write a PNG of GB/s over block size to `path`: one plot per kind of load, one line per contender, with its best
    depth at each block size. ImportError without the extra `plot`.
    """
    importlib.import_module("matplotlib").use("agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    kinds = sorted({row.kind for row in rows})
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(6 * len(kinds), 4.5), squeeze=False, layout="constrained")
    for axis, kind in zip(axes[0], kinds, strict=True):
        for who in dict.fromkeys(row.who for row in rows):
            best: dict[int, float] = {}
            for row in rows:
                if row.who == who and row.kind == kind:
                    best[row.block_bytes] = max(best.get(row.block_bytes, 0.0), measure.median(row.samples).gb_per_s)
            if best:
                axis.plot(list(map(_format_size, sorted(best))), [best[b] for b in sorted(best)], marker="o", label=who)
        axis.set(title=kind, xlabel="block", ylabel="GB/s", ylim=(0, None))
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _format_size(nbytes: int) -> str:
    """Return a block size as text, in MiB or KiB."""
    return f"{nbytes >> 20}M" if nbytes % (1 << 20) == 0 else f"{nbytes >> 10}K"
