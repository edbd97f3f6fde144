"""Changed copies of what the launcher is told: messages, lines and hostfiles, from a seeded generator."""

from __future__ import annotations

import json
import random
from typing import Any

ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 75, 2**31, 2**62, 2**63, 2**64, 10**400, -(2**63), 0.5, 1e308, -1e308),
    *(float("nan"), float("inf"), "", "x", "00000", "1", "-1", "stdout", "\ud800", "\x00", "é" * 50, "../x", "9" * 30),
    *([], [[]], {}, {"": []}, [None] * 3, {"0": {}}, {"999999999": 1}, {"1": {"entries": []}}),
]
NODE = ["00000", 11, 0]
STATE = {
    "round": 1,
    "complete": True,
    "closed": False,
    "deadline": 1.5e9,
    "participants": [[NODE, 0], [["00001", 12, 1], 1]],
    "waiting": [["00001", 13, 0]],
    "redundant": [],
    "heartbeats": [[NODE, 1.5e9], [["00001", 12, 1], 1.5e9]],
}
RECORD = {"entries": [[1, 1, 2, 3, "1", "gather", "w", "t.py:3"]], "started": 1, "finished": 0, "waiting": 1}
FAILURE = {
    "rank": 0,
    "host": "a",
    "pid": 1,
    "exit_code": 1,
    "cause": "c",
    "detail": "d",
    "seconds": 1.0,
    "step": 3,
    "at": 2.0,
}
FACTS = {
    **dict.fromkeys(["hostname", "address", "python", "executable", "io_engine"], "x"),
    **dict.fromkeys(["cores", "memory", "memory_free", "disk_free", "open_files"], 5),
    **dict.fromkeys(["shared_memory_free", "memlock", "free_port"], None),
    "versions": {"torch": "2"},
    "devices": ["a"],
    "backends": ["gloo"],
}
FROM_HOST: dict[str, dict[str, Any]] = {
    "beat": {},
    "hello": {"hostname": "x", "versions": {}, "address": ""},
    "examination": {"facts": FACTS, "sees_mark": True},
    "environment": {"kept": {"A": "b"}},
    "ready": {"failures": [FAILURE], "ended": [[1, 2.0]], "records": {"0": RECORD}},
    "store": {"port": 1234},
    "state": {"number": 1, "state": STATE, "version": 1},
    "served": {"round": 1, "port": 1234},
    "imported": {"imports": {"0": "[]"}},
    "started": {"pids": {"0": 11, "1": 12}},
    "lines": {"stream": "stdout", "text": "x\n"},
    "failed": {"attempt": 0, "divergence": None},
    "stalled": {"stalled": True, "records": {"0": RECORD, "1": RECORD}},
    "notice": {"text": "x"},
    "presence": {"attempt": 0, "arrived": [0], "ended": [1]},
    "done": {},
    "ended": {
        "failed": True,
        "failures": [FAILURE],
        "fates": ["x"],
        "notes": [],
        "records": {"0": RECORD},
        "left": "end",
        "why": "x",
    },
    "refused": {"why": "x"},
}
FROM_LAUNCHER: dict[str, dict[str, Any]] = {
    "beat": {},
    "examine": {"mark": "/x"},
    "job": {
        "job_id": "j",
        "spec": {"target": "t.py", "args": [], "nproc": 1, "env": {}, "elastic": [1, 2]},
        "how": "script",
        "variables": {"A": "b"},
        "colours": [True, False],
        "host": "a",
        "generation": 0,
        "address": "127.0.0.1",
        "elastic": {"place": "00000", "address": "127.0.0.1", "least": 1, "most": 2, "imports": {"0": "[]"}},
    },
    "serve": {"address": "127.0.0.1", "port": 0},
    "round": {"attempt": 0, "group_rank": 0, "groups": 2, "first": 0, "ranks": 2, "address": "127.0.0.1", "port": 1},
    "restart": {},
    "state": {"number": 1, "state": STATE, "version": 1, "replaced": True},
    "meet": {"round": 1, "attempt": 0, "first": 0, "ranks": 2, "address": "127.0.0.1", "port": 1},
    "again": {"attempt": 0},
    "grow": {"attempt": 0},
    "end": {},
    "finish": {},
    "dismiss": {},
    "stop": {},
}


def mutate(value: Any, rng: random.Random) -> Any:
    """A copy with one place changed to something odd, left out, doubled or swapped."""
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
            return value + value[index : index + 1] * rng.choice([1, 9])
        return [*value[:index], mutate(value[index], rng), *value[index + 1 :]]
    if type(value) is int and rng.random() < 0.4:
        return value + rng.choice([-1, 1, 7, 2**31, 2**62])
    return rng.choice(ODD)


def message(kinds: dict[str, dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    """A message of a known kind, right or changed."""
    kind = rng.choice(list(kinds))
    made: dict[str, Any] = {"kind": kind, "at": 1.0, **kinds[kind]}
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 4])):
        made = mutate(made, rng)
        if not isinstance(made, dict):
            return {"kind": made}
    return made


def line(value: Any, rng: random.Random) -> bytes:
    """Its line, sometimes with other bytes in it, cut, or nested beyond reason."""
    raw = json.dumps(value).encode()
    roll = rng.random()
    if roll < 0.8:
        return raw
    if roll < 0.86:
        return raw[: rng.randrange(len(raw) + 1)]
    if roll < 0.88:
        return rng.choice([b"[", b'{"a":', b"1", b"\xff\xfe"]) * rng.choice([1, 100, 20_000])
    changed = bytearray(raw)
    for _ in range(rng.randrange(1, 5)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def hostfile(rng: random.Random) -> str:
    """Lines of a hostfile, most of them right."""
    names = ["a", "b", "host-1", "user@host", "-oProxyCommand=x", "a b", "é", "x" * 300, "[::1]", "fe80::1%eth0"]
    slots = ["1", "8", "0", "-1", "٣", "99999999999", "1.5", "", "9" * 400, "0x10", "65537", "65536"]
    lines = []
    for _ in range(rng.randrange(6)):
        gap = rng.choice([" ", " ", "\t", "  ", ""])
        text = f"{rng.choice(names)}{gap}slots={rng.choice(slots)}"
        roll = rng.random()
        if roll < 0.3:
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(["#", "\x00", "\r", "\x85", " ", "=", "slots=1"]) + text[at:]
        lines.append(text)
    return rng.choice(["\n", "\n", "\r\n", "\x0b"]).join(lines)


def words(rng: random.Random) -> str:
    """A filter over hosts."""
    return "".join(rng.choice(["a", "b", ":", ",", "@", "0", "1", "-", "x", "٣", " "]) for _ in range(rng.randrange(9)))
