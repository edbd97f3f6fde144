"""No manifest or header, however wrong, crashes the reader, makes it allocate wildly, or leads it outside."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zero_ckpt import CheckpointError, FileExtent, Interval, open_checkpoint, save_sharded, verify
from zero_ckpt.inspecting import describe
from zero_ckpt.manifest import MAGIC
from zero_ckpt.plain import pack, unpack
from zero_ckpt.safetensors_file import encode_header, parse_header

CASES = int(os.environ.get("ZERO_FUZZ_CASES", "1000000"))
"""Of each soak here."""
ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**62, 2**63, 2**64 - 1, 2**200, -(2**63), 0.5, float("nan"), float("inf")),
    *("", "../x", "/etc/passwd", "a/../../b", "rank-00000.safetensors\0", "xxh3_64:0000000000000000", "F32", "F7"),
    *(b"", b"\xff", [], [[]], {}, {"": []}, [2**40] * 3),
]


def seal(body: bytes) -> bytes:
    return MAGIC + xxhash.xxh3_64_digest(body) + body


def mutate(value: Any, rng: random.Random) -> Any:
    """A copy with one or more places changed to something odd."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = dict(value)
        if rng.random() < 0.15:
            del changed[key]
        else:
            changed[key] = mutate(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        roll = rng.random()
        if roll < 0.1:
            return value[:index] + value[index + 1 :]
        if roll < 0.2:
            return value + value[index : index + 1]
        return [*value[:index], mutate(value[index], rng), *value[index + 1 :]]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 4096, -4096, 2**40])
    return rng.choice(ODD)


def mangle(body: bytes, rng: random.Random) -> bytes:
    """Another body: structurally mutated, truncated, bit-flipped, or a bomb of nested containers."""
    roll = rng.random()
    if roll < 0.7:
        return pack(mutate(unpack(body), rng))
    if roll < 0.8:
        return body[: rng.randrange(len(body))]
    if roll < 0.95:
        raw = bytearray(body)
        for _ in range(rng.randrange(1, 5)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw)
    bomb = rng.choice([b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91"])
    return bomb * rng.choice([1, 100, 5000])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    root, store = tmp_path_factory.mktemp("fuzz"), tmp_path_factory.mktemp("store") / "g.extents"
    store.write_bytes(b"linked" * 1000)
    tensors = [Interval(name, "param", (6,), "U8", 0, b"abcdef") for name in ("v", "w")]
    tensors += [Interval("linked", "exp_avg", (3, 4), "U8", 0, FileExtent(store, 4098, 12))]
    path = save_sharded(root, "t", tensors, step=1, client_state={"a": 1}, aliases={"x": "w"})
    return path, (path / "manifest.msgpack").read_bytes()[16:]


def read_all(path: Path) -> None:
    verify(path)
    opened = open_checkpoint(path)
    describe(opened)
    for name, kind in opened.tensors:
        opened.read(name, kind)


def check(path: Path, body: bytes) -> bool:
    """Return whether a checkpoint with this manifest is read."""
    (path / "manifest.msgpack").write_bytes(seal(body))
    try:
        read_all(path)
    except CheckpointError:
        return False
    return True


@given(st.integers(0, 2**63))
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mangled_manifest_is_refused_or_read(checkpoint: tuple[Path, bytes], seed: int) -> None:
    path, body = checkpoint
    check(path, mangle(body, random.Random(seed)))


def memory(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.soak
@pytest.mark.timeout(36_000)
def test_a_million_mangled_manifests_and_extents(checkpoint: tuple[Path, bytes]) -> None:
    path, body = checkpoint
    before = {entry.name for entry in path.parent.iterdir()}
    rng = random.Random()
    check(path, body)
    forget_peak()
    held = memory("VmRSS")
    slowest, refused = 0.0, 0
    for _ in range(CASES):
        begin = time.process_time()
        refused += not check(path, mangle(body, rng))
        slowest = max(slowest, time.process_time() - begin)
    assert {entry.name for entry in path.parent.iterdir()} == before
    grown = memory("VmHWM") - held
    print(f"{CASES} manifests: {refused} refused, 0 crashes, {grown >> 20} MiB at most, slowest {slowest:.2f} s")
    assert grown < 64 << 20 and slowest < 10


def mangle_header(text: bytes, rng: random.Random) -> bytes:
    """Another safetensors header: structurally mutated, cut, with other bytes, or with a key twice."""
    roll = rng.random()
    if roll < 0.6:
        return json.dumps(mutate(json.loads(text), rng), default=repr).encode()
    if roll < 0.7:
        return text[: rng.randrange(len(text))]
    if roll < 0.8:
        return text[:-1] + b"," + text[1:]
    raw = bytearray(text)
    for _ in range(rng.randrange(1, 5)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


def check_header(text: bytes) -> bool:
    """Return whether a header is read; one that is holds entries inside of the file that do not overlap."""
    try:
        entries, _ = parse_header(bytes(8) + text, 1 << 20, "file")
    except CheckpointError:
        return False
    end = 8 + len(text)
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        assert entry.begin == entry.end or entry.begin >= end
        assert entry.end <= 1 << 20
        end = max(end, entry.end)
    return True


def header() -> bytes:
    return encode_header([(f"t{index}", "F32", (index, 2)) for index in range(6)], {"format": "pt"})[0][8:]


@given(st.integers(0, 2**63))
@settings(max_examples=2000, deadline=None)
def test_a_mangled_header_is_refused_or_read(seed: int) -> None:
    check_header(mangle_header(header(), random.Random(seed)))


@pytest.mark.soak
@pytest.mark.timeout(36_000)
def test_a_million_mangled_headers() -> None:
    text, rng = header(), random.Random()
    assert check_header(text)
    forget_peak()
    held, slowest, refused = memory("VmRSS"), 0.0, 0
    for _ in range(CASES):
        begin = time.process_time()
        refused += not check_header(mangle_header(text, rng))
        slowest = max(slowest, time.process_time() - begin)
    grown = memory("VmHWM") - held
    print(f"{CASES} headers: {refused} refused, 0 crashes, {grown >> 20} MiB at most, slowest {slowest:.2f} s")
    assert grown < 64 << 20 and slowest < 10


@given(st.binary(max_size=200), st.integers(0, 2**20))
@settings(max_examples=500, deadline=None)
def test_a_wrong_safetensors_header_is_refused(text: bytes, nbytes: int) -> None:
    try:
        parse_header(len(text).to_bytes(8, "little") + text, nbytes, "file")
    except CheckpointError:
        return


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"a":{"dtype":"F32","shape":[' + "9" * 10_000 + "]}}", "[]", "1"])
def test_headers_built_to_hurt_are_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="safetensors header|no valid shape"):
        parse_header(bytes(8) + text.encode(), 1 << 20, "file")
