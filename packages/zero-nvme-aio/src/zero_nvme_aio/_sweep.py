"""The sweep behind `zero-nvme-aio bench`."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from . import _fio, measure
from ._engine import Engine
from ._memory import AlignedBuffer
from .measure import Sample, Setting

__all__ = ["Row", "points", "save_plot", "sweep", "table"]


class Row(NamedTuple):
    """One line of the result: who (a setting, or fio), read, write or mixed, and the samples."""

    who: str
    block_bytes: int
    queue_depth: int
    kind: str
    samples: list[Sample]


def points(
    backends: Sequence[str],
    blocks: Sequence[int],
    depths: Sequence[int],
    threads: Sequence[int],
    memories: Sequence[str],
    direct: bool,
) -> list[Setting]:
    """Every combination."""
    return [
        Setting(backend, block, depth, count, memory, direct)
        for backend, block, depth, count, memory in itertools.product(backends, blocks, depths, threads, memories)
    ]


def sweep(
    folder: str, settings: Sequence[Setting], kinds: Sequence[str], nbytes: int, repeats: int, with_fio: bool
) -> list[Row]:
    """Measures every point `repeats` times, interleaved; the first round only warms up."""
    memories: dict[str, Any] = {"aligned": memoryview(AlignedBuffer(nbytes))}
    if any(setting.memory == "plain" for setting in settings):
        memories["plain"] = measure.plain_memory(nbytes)
    with Engine() as io:
        path = measure.file_for_bench(io, folder, nbytes, memories["aligned"])
    rows: dict[tuple[Any, str], Row] = {}
    try:
        for round_number in range(repeats + 1):
            for key, row, sample in _round(path, settings, kinds, nbytes, memories, with_fio):
                if round_number > 0:
                    rows.setdefault(key, row).samples.append(sample)
    finally:
        os.unlink(path)
    return list(rows.values())


def _round(
    path: str, settings: Sequence[Setting], kinds: Sequence[str], nbytes: int, memories: dict[str, Any], with_fio: bool
) -> Iterator[tuple[tuple[Any, str], Row, Sample]]:
    for setting, kind in itertools.product(settings, kinds):
        sample = one(setting, kind, path, memories[setting.memory], nbytes)
        route = setting.memory if setting.direct else "buffered"
        who = f"{setting.backend} x{setting.threads} {route}"
        yield (setting, kind), Row(who, setting.block_bytes, setting.queue_depth, kind, []), sample
    if not with_fio:
        return
    shapes = sorted({(setting.block_bytes, setting.queue_depth) for setting in settings})
    for (block, depth), engine, kind in itertools.product(shapes, _fio.ENGINES, kinds):
        if kind != "mixed":
            sample = _fio.run(kind, path, nbytes, engine, block, depth)
            yield ((engine, block, depth), kind), Row(f"fio {engine}", block, depth, kind, []), sample


def one(setting: Setting, kind: str, path: str, memory: memoryview, nbytes: int) -> Sample:
    """One transfer of the whole file; "mixed" reads one half while it writes the other."""
    with setting.engine() as io, io.open(path, "rw", direct="auto" if setting.direct else False) as file:
        if kind == "read":
            return measure.measure(lambda: io.read(file, memory, 0).wait())
        if kind == "write":
            return measure.measure(lambda: io.write(file, memory, 0).wait())
        half = nbytes // 2 // 4096 * 4096

        def mixed() -> int:
            reading = io.read(file, memory[:half], 0)
            writing = io.write(file, memory[half:], half)
            return reading.wait() + writing.wait()

        return measure.measure(mixed)


def table(rows: Sequence[Row]) -> Any:
    """A rich table, best first per kind, each with its ratio to the best fio point of the kind."""
    from rich.table import Table

    out = Table(title="GB/s, median (least to most); 1 GB = 1e9 bytes")
    for column in ("", "block", "depth", "kind", "GB/s", "spread", "CPU s/GB", "x best fio"):
        out.add_column(column, justify="left" if column in ("", "kind") else "right")
    best_fio: dict[str, float] = {}
    for row in rows:
        if row.who.startswith("fio"):
            best_fio[row.kind] = max(best_fio.get(row.kind, 0.0), measure.median(row.samples).gb_per_s)
    for row in sorted(rows, key=lambda r: (r.kind, -measure.median(r.samples).gb_per_s)):
        middle = measure.median(row.samples)
        speeds = [sample.gb_per_s for sample in row.samples]
        ratio = f"{middle.gb_per_s / best_fio[row.kind]:.2f}" if row.kind in best_fio else ""
        spread = f"{min(speeds):.2f}-{max(speeds):.2f}"
        numbers = (f"{middle.gb_per_s:.2f}", spread, f"{middle.cpu_s_per_gb:.4f}", ratio)
        out.add_row(row.who, _size(row.block_bytes), str(row.queue_depth), row.kind, *numbers)
    return out


def save_plot(rows: Sequence[Row], path: str) -> None:
    """GB/s over block size, one line per contender, as a PNG; needs the extra `plot`."""
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
                axis.plot(list(map(_size, sorted(best))), [best[b] for b in sorted(best)], marker="o", label=who)
        axis.set(title=kind, xlabel="block", ylabel="GB/s", ylim=(0, None))
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20}M" if nbytes % (1 << 20) == 0 else f"{nbytes >> 10}K"
