"""Indexes of extent stores and headers of safetensors files, changed in any place: read, or a FormatError."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from zero_nvme_aio import ExtentStore, _header, errors
from zero_nvme_aio.extents._index import read_index

CASES = int(os.environ.get("ZERO_FUZZ_CASES", "1000000"))
"""Of each soak here."""
MOST_BYTES = 64 << 20
DATA_BYTES = 6 * 8 + 4 * 4
ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**62, 2**64, 10**400, -(2**63), 0.5, float("nan"), float("inf")),
    *("", "x", "0", "01", "1", "../x", "/etc/passwd", "a\0b", "\ud800", "F32", "F4", "raw", "xxh3_64:0"),
    *([], [[]], {}, {"": []}, [0, 1], [0, 0, 0, 0, "", ""], [2**40] * 70, {"0": ["x", 1]}),
]


def mutate(value: Any, rng: random.Random) -> Any:
    """A copy with one place changed to something odd, left out or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = dict(value)
        roll = rng.random()
        if roll < 0.12:
            del changed[key]
        elif roll < 0.2:
            changed[str(rng.choice(ODD))] = changed.pop(key)
        else:
            changed[key] = mutate(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        index, roll = rng.randrange(len(value)), rng.random()
        if roll < 0.1:
            return value[:index] + value[index + 1 :]
        if roll < 0.2:
            return value + value[index : index + 1]
        return [*value[:index], mutate(value[index], rng), *value[index + 1 :]]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 4096, -4096, 2**40])
    return rng.choice(ODD)


def changed(text: bytes, rng: random.Random) -> bytes:
    """Another text: another value in some places, cut, with other bytes, with a key twice, or nested beyond reason."""
    roll = rng.random()
    if roll < 0.7:
        value = json.loads(text)
        for _ in range(rng.choice([1, 1, 2, 3])):
            value = mutate(value, rng)
        return json.dumps(value).encode()
    if roll < 0.78:
        return text[: rng.randrange(len(text))]
    if roll < 0.82:
        return text[:-1] + b"," + text[1:]
    if roll < 0.83:
        return rng.choice([b"[", b'{"a":', b"9"]) * rng.choice([1, 20_000])
    raw = bytearray(text)
    for _ in range(rng.randrange(1, 5)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


class Indexes:
    """A sealed store whose index is changed, with the checksum that goes with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with ExtentStore(folder, prefix="s") as store:
            for name in ("v", "w"):
                store.declare(name, 5000)
                store.write(name, bytes(5000))
            store.seal()
        (self.path,) = folder.glob("*.index")
        self.good = self.path.read_bytes()

    def check(self, rng: random.Random) -> bool:
        body = changed(self.good.partition(b"\n")[2], rng)
        self.path.write_bytes(f"xxh3_64:{xxhash.xxh3_64_hexdigest(body)}\n".encode() + body)
        try:
            sealed = read_index(str(self.path))
        except errors.FormatError as error:
            assert len(str(error)) < 2000
            return False
        for piece in sealed.pieces:
            assert piece.file_offset + piece.nbytes <= sealed.files[piece.stripe][1]
        if rng.random() < 0.02:
            self.reopen()
        return True

    def reopen(self) -> None:
        try:
            with ExtentStore(self.folder, prefix="s", resume=True) as store:
                for name, extents in store.extents().items():
                    out = bytearray(extents[-1].offset_bytes + extents[-1].nbytes)
                    if len(out) < 1 << 20:
                        store.read(name, out, verify=True).wait()
        except errors.AioError:
            return


class Headers:
    """The header of a file of six numbers and four."""

    def __init__(self, folder: Path) -> None:
        entries = [_header.TensorInfo("a", "F64", (2, 3), 0, 48), _header.TensorInfo("b", "F32", (4,), 48, 64)]
        self.text = _header.build(entries, {"format": "pt"})[8:].rstrip()

    def check(self, rng: random.Random) -> bool:
        try:
            entries, _ = _header.parse("file", changed(self.text, rng), DATA_BYTES)
        except errors.FormatError as error:
            assert len(str(error)) < 4000
            return False
        position = 0
        for entry in entries:
            assert entry.begin == position <= entry.end <= DATA_BYTES and entry.name.encode() is not None
            position = entry.end
        return True


KINDS: dict[str, Callable[[Path], Indexes | Headers]] = {"indexes": Indexes, "headers": Headers}


def memory(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(field + ":")[2].split()[0]) << 10


def run(kind: str, count: int, rng: random.Random, folder: Path) -> str:
    """So many cases; how many were refused, what the slowest took and how far the memory grew."""
    subject = KINDS[kind](folder)
    for _ in range(min(count, 200)):
        subject.check(rng)
    Path("/proc/self/clear_refs").write_text("5")
    held, slowest, refused = memory("VmRSS"), 0.0, 0
    for _ in range(count):
        begin = time.process_time()
        refused += not subject.check(rng)
        slowest = max(slowest, time.process_time() - begin)
    grown = memory("VmHWM") - held
    assert grown < MOST_BYTES and slowest < 10
    return f"{count} {kind}: {refused} refused, 0 crashes, {grown >> 20} MiB at most, slowest {slowest:.3f} s"


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_index_or_header_is_refused_or_read(kind: str, tmp_path: Path) -> None:
    run(kind, 800, random.Random(4), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_changed_indexes_and_headers(kind: str, tmp_path: Path) -> None:
    print(run(kind, CASES, random.Random(), tmp_path))


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":[],"shape":[],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[' + "9223372036854775807," * 200_000 + '1],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    ],
    ids=["dtype", "dimensions", "twice", "surrogate"],
)
def test_headers_built_to_hurt_are_refused_at_once(header: str) -> None:
    begin = time.process_time()
    with pytest.raises(errors.FormatError, match="'file'"):
        _header.parse("file", header.encode(), 1)
    assert time.process_time() - begin < 5


def test_a_child_that_was_forked_while_a_store_was_open_does_not_keep_it(tmp_path: Path) -> None:
    store = ExtentStore(tmp_path, prefix="s")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent is through
        os._exit(0)
    try:
        store.close(remove=True)
        ExtentStore(tmp_path, prefix="s").close(remove=True)
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)
