"""Helpers of the tests of stores over several paths."""

from __future__ import annotations

import random

from zero_nvme_aio import Engine, ExtentStore
from zero_nvme_aio.testing import Delay, Fault, FaultyEngine, faulty_engine

KIB, MIB = 1024, 1 << 20
UNIT = 64 * KIB


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def get(store: ExtentStore, name: str, nbytes: int, offset: int = 0) -> bytes:
    out = bytearray(nbytes)
    assert store.read(name, out, offset).wait() == nbytes
    return bytes(out)


def second_is(engine: Engine, *faults: Fault) -> list[Engine]:
    """Engines of which the second, of the second path, has ``faults``."""
    return [engine, faulty_engine(*faults)]


def slow_engine(*slower: Fault) -> FaultyEngine:
    """An engine whose blocks of a MiB take 3 ms each, and longer by ``slower``."""
    return faulty_engine(Delay(seconds=0.003), *slower, queue_depth=1, block_bytes=MIB, threads=1)
