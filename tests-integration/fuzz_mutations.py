"""Changed copies of what is read from outside: values of a structured text replaced, and bytes changed anywhere."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 75, 2**31, 2**62, 2**63, 2**64 - 1, 2**200, 10**5000, -(2**63)),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "1", "-1", "٣", "auto", "cpu", "nvme", "fp16", "1e-3"),
    *("\ud800", "\x00", "é" * 50, "x" * 300, "9" * 30, "../x", "/etc/passwd", "a/../../b", "F32", "F7", "raw"),
    *("xxh3_64:0000000000000000", [], [[]], {}, {"": []}, {"": 1}, [None] * 3, [2**40] * 70, {"0": ["x", 1]}),
    *({"enabled": True}, {"device": "nvme"}, {"999999999": 1}, [0, 0, 0, 0, "", ""]),
)
"""Values that may stand in the place of any other."""


@dataclass(frozen=True)
class Form:
    """How a text is taken apart and put together for changes in it; `words` are put into it as they are.

    `loads` and `dumps` raise ValueError for what they cannot do; without them there are changes of bytes alone.
    """

    words: tuple[bytes, ...]
    loads: Callable[[bytes], Any] | None = None
    dumps: Callable[[Any], bytes] | None = None


def json_bytes(value: Any) -> bytes:
    """Return the JSON of a value, in UTF-8."""
    return json.dumps(value).encode()


JSON = Form((b"[" * 20_000, b'{"a":' * 20_000, b"9" * 5000, b"\xff\xfe", b"{}", b"[]", b"null"), json.loads, json_bytes)


def changed(data: bytes, rng: random.Random, form: Form) -> bytes:
    """Return a copy with some values or some bytes changed."""
    if form.loads is not None and form.dumps is not None and rng.random() < 0.7:
        try:
            value = form.loads(data)
            for _ in range(rng.choice([1, 1, 1, 2, 4])):
                value = mutate(value, rng)
            return form.dumps(value)
        except (ValueError, RecursionError):
            return changed_bytes(data, rng, form.words)
    return changed_bytes(data, rng, form.words)


def mutate(value: Any, rng: random.Random) -> Any:
    """Return a copy with one place changed to something odd, left out, renamed or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key, roll = rng.choice(list(value)), rng.random()
        rest = dict(value)
        if roll < 0.12:
            del rest[key]
        elif roll < 0.2:
            rest[_renamed(str(key), rng)] = rest.pop(key)
        else:
            rest[key] = mutate(value[key], rng)
        return rest
    if isinstance(value, list) and value and rng.random() < 0.9:
        index, roll = rng.randrange(len(value)), rng.random()
        if roll < 0.1:
            return value[:index] + value[index + 1 :]
        if roll < 0.2:
            return value + value[index : index + 1] * rng.choice([1, 1, 9])
        return [*value[:index], mutate(value[index], rng), *value[index + 1 :]]
    if type(value) in (int, float) and -(2.0**70) < value < 2.0**70 and rng.random() < 0.5:
        steps = [value - 1, value + 1, -value, value * 2, value + 4096, value + 2**40, str(value), bool(value)]
        return rng.choice(steps)
    return rng.choice(ODD)


def _renamed(key: str, rng: random.Random) -> str:
    """Return another key: an odd one, or the same with another character."""
    if not key or rng.random() < 0.3:
        return str(rng.choice(("", "x", "0", "-1", "é", "\x00")))
    at = rng.randrange(len(key))
    return key[:at] + rng.choice("aA_.- é01") + key[at + 1 :]


def changed_bytes(data: bytes, rng: random.Random, words: tuple[bytes, ...]) -> bytes:
    """Return a copy that is cut, has other bytes, a stretch twice, or one of the words in it."""
    roll, at = rng.random(), rng.randrange(len(data) + 1)
    if roll < 0.2 or not data:
        return data[:at] + rng.choice(words) + data[at:]
    if roll < 0.4:
        return data[:at]
    if roll < 0.55:
        end = rng.randrange(at, len(data) + 1)
        return data[:end] + data[at:end] + data[end:]
    raw = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)
