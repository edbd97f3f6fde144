"""Configurations that are wrong in any place are refused as a ConfigError, and those that load are what they say."""

from __future__ import annotations

import copy
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from samples import SAMPLES

from zero_config import Config, ConfigError, known_keys

CASES = int(os.environ.get("ZERO_FUZZ_CASES", "1000000"))
"""Of each soak here."""
MOST_BYTES = 64 << 20
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**400, 10**5000, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "auto", "none", "cpu", "nvme", "fp16", "true", "1e-3", "\ud800", "x" * 300, "\x00", "٣", b"x", object()),
    *([], [[]], {}, {"": 1}, {1: 2}, [None], [1e400], {"enabled": True}, {"enabled": "auto"}, {"device": "nvme"}),
]
KEYS = [key for section in ("", "zero_optimization", "optimizer", "fp16", "checkpoint") for key in known_keys(section)]


def mutate(value: Any, rng: random.Random) -> Any:
    """A copy with one place changed, left out, renamed or added."""
    if isinstance(value, dict) and rng.random() < 0.92:
        changed = dict(value)
        roll = rng.random()
        if not value or roll < 0.15:
            changed[rng.choice([rng.choice(KEYS), rng.choice(KEYS), "x"])] = rng.choice(ODD)
            return changed
        key = rng.choice(list(value))
        if roll < 0.25:
            del changed[key]
        elif roll < 0.32 and isinstance(key, str) and key:
            at = rng.randrange(len(key))
            changed[key[:at] + rng.choice("aA_.- é") + key[at + 1 :]] = changed.pop(key)
        else:
            changed[key] = mutate(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value + value[index : index + 1]
        return [*value[:index], mutate(value[index], rng), *value[index + 1 :]]
    if type(value) in (int, float) and -(2.0**70) < value < 2.0**70 and rng.random() < 0.4:
        return rng.choice([-value, value + 1, value * 2, value // 3, str(value), bool(value)])
    return rng.choice(ODD)


def check(source: Any) -> bool:
    """Return whether a configuration loads; one that does says what is in force, and loads again from that."""
    try:
        config = Config.load(source, world_size=2, model_hint=64)
    except ConfigError as error:
        assert len(str(error)) < 20_000
        return False
    plain = config.to_plain()
    assert Config.load(copy.deepcopy(plain), world_size=2).to_plain() == plain
    return True


def check_case(rng: random.Random, file: Path) -> bool:
    """A changed sample, as a mapping or as the text of a file."""
    source: Any = SAMPLES[rng.choice(list(SAMPLES))]
    for _ in range(rng.choice([1, 1, 2, 3])):
        source = mutate(source, rng)
    roll = rng.random()
    if roll < 0.8:
        return check(source)
    try:
        text = bytearray(json.dumps(source, default=str).encode(errors="replace"))
    except ValueError:  # a number of thousands of digits
        return check(source)
    if roll < 0.9 and text:
        for _ in range(rng.randrange(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
    elif roll < 0.91:
        text = bytearray(rng.choice([b"[", b'{"optimizer":', b"9" * 5000, b"\xff"]) * rng.choice([1, 30_000]))
    file.write_bytes(text)
    return check(file)


def memory(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(field + ":")[2].split()[0]) << 10


def run(count: int, rng: random.Random, file: Path) -> str:
    """So many cases; how many were refused, what the slowest took and how far the memory grew."""
    for _ in range(min(count, 200)):
        check_case(rng, file)
    Path("/proc/self/clear_refs").write_text("5")
    held, slowest, refused = memory("VmRSS"), 0.0, 0
    for _ in range(count):
        begin = time.process_time()
        refused += not check_case(rng, file)
        slowest = max(slowest, time.process_time() - begin)
    grown = memory("VmHWM") - held
    assert grown < MOST_BYTES and slowest < 10
    return f"{count} configurations: {refused} refused, 0 crashes, {grown >> 20} MiB at most, slowest {slowest:.3f} s"


@pytest.mark.filterwarnings("ignore")
def test_a_changed_configuration_is_refused_or_loads(tmp_path: Path) -> None:
    run(400, random.Random(2), tmp_path / "config.json")


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@pytest.mark.filterwarnings("ignore")
def test_a_million_changed_configurations(tmp_path: Path) -> None:
    print(run(CASES, random.Random(), tmp_path / "config.json"))
