"""Random sizes, offsets and alignments on every backend and file system; the failing assert names the example."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from zero_nvme_aio import AlignedBuffer, Engine
from zero_nvme_aio.testing import Reorder, Shorten, faulty_engine

MIB = 1 << 20
LARGEST = 64 * MIB + 7
FEW_OR_MANY = pytest.mark.parametrize("examples", [8, pytest.param(100, marks=pytest.mark.soak)])

NOISE = AlignedBuffer(LARGEST + 4096)
memoryview(NOISE)[:] = random.Random(0).randbytes(MIB + 13) * (LARGEST // MIB) + bytes(
    len(NOISE) - (MIB + 13) * (LARGEST // MIB)
)


def sizes(generator: random.Random) -> int:
    """Mostly small, always around the edges of sectors, pages and blocks, sometimes the largest."""
    edge = generator.choice([0, 1, 512, 4096, 65536, MIB, 4 * MIB, 16 * MIB, 64 * MIB])
    weights = {64 * MIB: 0.3, 16 * MIB: 0.6}
    if generator.random() > weights.get(edge, 1.0):
        edge = MIB
    return max(0, min(LARGEST, edge + generator.randint(-8, 7)))


def check(io: Engine, path: Path, generator: random.Random, label: str) -> None:
    size = sizes(generator)
    offset = generator.choice([0, 1, 511, 512, 4095, 4096, 12345, MIB + 1])
    shift = generator.choice([0, 0, 1, 8, 64, 512, 4095])
    target_shift = generator.choice([0, 0, 1, 64, 512])
    data = memoryview(NOISE)[shift : shift + size]
    out = memoryview(AlignedBuffer(size + target_shift + 1))[target_shift : target_shift + size]
    cuts = sorted(generator.choices(range(size + 1), k=generator.choice([0, 0, 1, 5])))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    what = f"{label}: {size} bytes at {offset}, memory +{shift}/+{target_shift}, cuts {cuts}"
    with io.open(path, "rw") as file:
        before = bytearray(offset)
        io.write(file, b"\xee" * offset, 0).wait()
        written = io.write(file, parts, offset, checksum=True)
        assert written.wait() == size, what
        io.write(file, b"\xdd", offset + size).wait()
        got = io.read(file, out, offset, checksum=True)
        assert got.wait() == size, what
        assert out == data, what
        assert written.checksum == got.checksum, what
        io.read(file, before, 0).wait()
        assert before == b"\xee" * offset, what
        tail = bytearray(1)
        io.read(file, tail, offset + size).wait()
        assert tail == b"\xdd", what
    path.unlink()


def settings(generator: random.Random) -> dict[str, int]:
    return {
        "queue_depth": generator.choice([1, 2, 7, 32]),
        "block_bytes": generator.choice([4096, 65536, 3 * 65536, MIB, 4 * MIB]) if generator.random() < 0.7 else MIB,
        "threads": generator.choice([1, 1, 2, 3]),
    }


@FEW_OR_MANY
def test_any_size_offset_and_alignment(backend: str, folder: Path, examples: int) -> None:
    for example in range(examples):
        generator = random.Random(f"{example}")
        chosen = settings(generator)
        if chosen["block_bytes"] == 4096:
            chosen["queue_depth"] = 32  # 16,000 blocks one after the other take long
        with Engine(backend=backend, **chosen) as io:
            check(io, folder / "f", generator, f"example {example} {chosen}")


@FEW_OR_MANY
def test_any_size_offset_and_alignment_under_faults(backend: str, tmp_path: Path, examples: int) -> None:
    for example in range(examples // 2):
        generator = random.Random(f"faults {example}")
        chosen = {**settings(generator), "block_bytes": 65536}
        faults = [Shorten(every=generator.choice([2, 3, 5]), fraction=generator.random()), Reorder(seed=example)]
        if faults[0].fraction == 0:  # type: ignore[attr-defined]
            continue
        with faulty_engine(*faults, backend=backend, **chosen) as io:
            check(io, tmp_path / "f", generator, f"faults, example {example} {chosen}")


@pytest.mark.parametrize("nbytes", [0, LARGEST])
def test_the_smallest_and_the_largest(backend: str, folder: Path, nbytes: int) -> None:
    data = memoryview(NOISE)[1 : 1 + nbytes]
    out = bytearray(nbytes)
    with Engine(backend=backend) as io, io.open(folder / "f", "rw") as file:
        assert io.write(file, data, 7).wait() == nbytes
        assert io.read(file, out, 7).wait() == nbytes
    assert out == data
