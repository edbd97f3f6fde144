"""Finds the best setting for a device in under a minute and stores it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from . import measure
from ._engine import Engine
from ._memory import AlignedBuffer
from ._probe import probe
from ._tuning import Tuning, remember
from .measure import Sample, Setting

__all__ = ["tune"]

BLOCKS = (256 << 10, 1 << 20, 4 << 20)
DEPTHS = {256 << 10: 64, 1 << 20: 32, 4 << 20: 8}
THREADS = (1, 2)
FINALISTS = 6
"""Settings that two further rounds repeat."""
MEASUREMENTS = len(BLOCKS) * 2 * len(THREADS) + 2 * FINALISTS
"""Of all rounds, if the time is enough."""


def tune(
    folder: str | os.PathLike[str],
    *,
    file_bytes: int = 256 << 20,
    budget_seconds: float = 45.0,
    store: bool = True,
    report: Callable[[Setting, Sample, Sample], None] | None = None,
) -> Tuning:
    """Measure blocks, depths and threads over a scratch file of `file_bytes` in `folder`; return the best setting.

    The first round measures every setting, interleaved; two further rounds repeat the six best, until `budget_seconds`
    are used. Best: the highest harmonic mean of read and write speed; within 3 % of it the setting with the fewest
    threads and the least processor time. With `store` the result is stored for engines whose block size and depth are
    not given. `report` is called after each measurement with the setting and its read and write timing. Raises
    MissingPathError, NoSpaceError.
    """
    name = os.fspath(folder)
    memory = AlignedBuffer(file_bytes)
    results: dict[Setting, list[tuple[Sample, Sample]]] = {}
    start = time.monotonic()
    with Engine() as io:
        path = measure.file_for_bench(io, name, file_bytes, memory)
    try:
        for round_number, points in enumerate(_settings_by_round(results)):
            for setting in points:
                if round_number > 0 and time.monotonic() - start > budget_seconds:
                    break
                pair = _measure_setting(setting, path, memory)
                # The first round warms device and memory up, and only sorts.
                results.setdefault(setting, []).append(pair)
                if report is not None:
                    report(setting, *pair)
    finally:
        os.unlink(path)
    best = _best(results)
    reads, writes = zip(*results[best], strict=True)
    tuning = Tuning(
        best.backend,
        best.block_bytes,
        best.queue_depth,
        best.threads,
        round(measure.median(reads).gb_per_s, 3),
        round(measure.median(writes).gb_per_s, 3),
    )
    if store:
        remember(name, tuning)
    return tuning


def _settings_by_round(results: dict[Setting, list[tuple[Sample, Sample]]]) -> Iterator[list[Setting]]:
    """Yield, for each of three rounds, the settings to be measured in it: all of them in the first round, then twice
    the best six. `results`: the (read, write) samples of each setting so far, to which the caller adds while this runs.
    """
    chosen = probe().chosen or "threads"
    everything = [
        Setting(chosen, block, depth, threads)
        for block in BLOCKS
        for depth in (DEPTHS[block], DEPTHS[block] * 4)
        for threads in THREADS
    ]
    yield everything
    for _ in range(2):
        yield sorted(everything, key=lambda s: -_score(results[s]))[:FINALISTS]


def _measure_setting(setting: Setting, path: str, memory: AlignedBuffer) -> tuple[Sample, Sample]:
    """Write `memory` to the file at `path` and read it back, once each, with an engine of this setting; return the
    samples (read, write).
    """
    with setting.engine() as io, io.open(path, "rw") as file:
        write = measure.measure(lambda: io.write(file, memory, 0).wait())
        read = measure.measure(lambda: io.read(file, memory, 0).wait())
    return read, write


def _score(pairs: list[tuple[Sample, Sample]]) -> float:
    """Return the harmonic mean of the median read speed and the median write speed, in GB/s, of (read, write)
    samples.
    """
    reads, writes = zip(*pairs, strict=True)
    read, write = measure.median(reads).gb_per_s, measure.median(writes).gb_per_s
    return 2 * read * write / (read + write)


def _best(results: dict[Setting, list[tuple[Sample, Sample]]]) -> Setting:
    """Return the best of the settings that were measured most often: of those whose score is within 3 % of the highest,
    the one with the fewest threads, then the least processor time. `results`: (read, write) samples by setting.
    """
    most = max(len(pairs) for pairs in results.values())
    finalists = {setting: pairs for setting, pairs in results.items() if len(pairs) == most}
    top = max(map(_score, finalists.values()))
    near = [setting for setting, pairs in finalists.items() if _score(pairs) >= 0.97 * top]

    def cost(setting: Setting) -> tuple[int, float]:
        """Return the threads of a setting, and its processor seconds per GB read and written."""
        reads, writes = zip(*finalists[setting], strict=True)
        return setting.threads, measure.median(reads).cpu_s_per_gb + measure.median(writes).cpu_s_per_gb

    return min(near, key=cost)
