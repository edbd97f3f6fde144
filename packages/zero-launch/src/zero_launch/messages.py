"""Messages between the launcher and its agents on the hosts: every kind, with the form of its fields.

What comes over a connection is checked here before anybody acts on it, so that nonsense is a lost peer and not a crash
of whoever hears it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]
Check = Callable[[Any], bool]
MOST_BYTES = 16 << 20
"""No message is longer; text of ranks is sent in parts."""
_MOST_NUMBER = 1 << 62


def _is(kind: type) -> Check:
    return lambda value: type(value) is kind


def _text(value: Any) -> bool:
    """Return whether ``value`` is a string that UTF-8 can encode: JSON can spell halves of surrogate pairs."""
    if type(value) is not str:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(value: Any) -> bool:
    return type(value) in (int, float) and -_MOST_NUMBER < value < _MOST_NUMBER


def _time(value: Any) -> bool:
    """Return True for seconds since the epoch, of a year that calendars know."""
    return _number(value) and 0 <= value < 1 << 37


def _whole(value: Any) -> bool:
    return type(value) is int and _number(value)


def _natural(value: Any) -> bool:
    return _whole(value) and bool(value >= 0)


def _within(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _map(check: Check, key: Check) -> Check:
    return lambda value: type(value) is dict and all(key(k) and check(v) for k, v in value.items())


def _row(*checks: Check) -> Check:
    def whole(value: Any) -> bool:
        return (
            type(value) is list and len(value) == len(checks) and all(c(v) for c, v in zip(checks, value, strict=True))
        )

    return whole


def _fields(**checks: Check) -> Check:
    return lambda value: (
        type(value) is dict and all(name in value and check(value[name]) for name, check in checks.items())
    )


def _anything(value: Any) -> bool:
    return True


def _rank_key(key: Any) -> bool:
    return type(key) is str and key.isascii() and key.isdigit() and len(key) < 10


_flag, _texts = _is(bool), _list(_text)
_entry = _row(_natural, _natural, _whole, _whole, _text, _text, _text, _text)
_record = _fields(entries=_list(_entry), started=_natural, finished=_natural, waiting=_natural)
_records = _map(_record, _rank_key)
_port = _within(0, 65535)
_failure = _fields(
    rank=_natural,
    host=_text,
    pid=_natural,
    exit_code=_or_none(_whole),
    cause=_text,
    detail=_text,
    seconds=_number,
    step=_or_none(_natural),
    at=_number,
)
_failures = _list(_failure)
_ended = _list(_row(_natural, _time))
_variables = _map(_text, _text)
_size = _or_none(_natural)
_facts = _fields(
    hostname=_text,
    address=_text,
    python=_text,
    executable=_text,
    versions=_variables,
    cores=_natural,
    memory=_natural,
    memory_free=_natural,
    shared_memory_free=_size,
    memlock=_size,
    open_files=_whole,
    free_port=_or_none(_port),
    disk_free=_natural,
    devices=_texts,
    backends=_texts,
    io_engine=_text,
)

_node = _row(_text, _natural, _natural)
_meeting = _fields(
    round=_natural,
    complete=_flag,
    closed=_flag,
    deadline=_or_none(_time),
    participants=_list(_row(_node, _natural)),
    waiting=_list(_node),
    redundant=_list(_node),
    heartbeats=_list(_row(_node, _time)),
)
_imports = _map(_text, _rank_key)
_terms = _fields(place=_text, address=_text, least=_within(1, 1 << 30), most=_within(1, 1 << 30), imports=_imports)

FROM_HOST: Mapping[str, Mapping[str, Check]] = {
    "beat": {},
    "hello": {"hostname": _text, "versions": _variables, "address": _text},
    "examination": {"facts": _facts, "sees_mark": _or_none(_flag)},
    "environment": {"kept": _variables},
    "ready": {"failures": _failures, "ended": _ended, "records": _records},
    "store": {"port": _within(1, 65535)},
    "state": {"number": _natural, "state": _or_none(_meeting), "version": _or_none(_natural)},
    "served": {"round": _natural, "port": _within(1, 65535)},
    "imported": {"imports": _imports},
    "started": {"pids": _map(_natural, _rank_key)},
    "lines": {"stream": lambda value: value in ("stdout", "stderr"), "text": _text},
    "failed": {"attempt": _natural, "divergence": _or_none(_text)},
    "stalled": {"stalled": _flag, "records": _records},
    "notice": {"text": _text},
    "presence": {"attempt": _natural, "arrived": _list(_natural), "ended": _list(_natural)},
    "asked": {},
    "done": {},
    "ended": {"failed": _flag, "failures": _failures, "fates": _texts, "notes": _texts, "records": _records},
    "refused": {"why": _text},
}
"""A host's messages, with the fields that must be there."""
FROM_LAUNCHER: Mapping[str, Mapping[str, Check]] = {
    "beat": {},
    "examine": {"mark": _or_none(_text)},
    "job": {
        "job_id": _text,
        "spec": _map(_anything, _text),
        "how": lambda value: value in ("script", "module", "program"),
        "variables": _variables,
        "colours": _row(_flag, _flag),
        "host": _text,
        "generation": _natural,
        "address": _text,
        "elastic": _or_none(_terms),
    },
    "serve": {"address": _text, "port": _port},
    "round": {
        "attempt": _natural,
        "group_rank": _natural,
        "groups": _within(1, 1 << 30),
        "first": _natural,
        "ranks": _within(1, 1 << 30),
        "address": _text,
        "port": _within(1, 65535),
    },
    "restart": {},
    "state": {"number": _natural, "state": _or_none(_meeting), "version": _natural, "replaced": _flag},
    "meet": {
        "round": _natural,
        "attempt": _natural,
        "first": _natural,
        "ranks": _within(1, 1 << 30),
        "address": _text,
        "port": _within(1, 65535),
    },
    "again": {"attempt": _natural},
    "grow": {"attempt": _natural},
    "end": {},
    "finish": {},
    "dismiss": {},
    "stop": {},
}
"""The launcher's messages."""
_OPTIONAL: Mapping[str, Check] = {
    "divergence": _or_none(_text),
    "folder": _text,
    "left": _or_none(_text),
    "why": _or_none(_text),
}


def no_report() -> Message:
    """Return the fields of the message `ready` when there was no attempt before."""
    return {"failures": [], "ended": [], "records": {}}


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the message as one line of JSON, without the newline."""
    return json.dumps(message).encode()


def decode(line: bytes, kinds: Mapping[str, Mapping[str, Check]]) -> Message:
    """Read a message of one of ``kinds`` from its line. Raises ValueError, with what is wrong, for anything else."""
    message = read_object(line)
    kind = message.get("kind")
    if type(kind) is not str or kind not in kinds:
        raise ValueError(f"no such kind of message: {_short(kind)}")
    if not _number(message.get("at")):
        raise ValueError(f"message {kind!r} has no time")
    for name, check in kinds[kind].items():
        if name not in message or not check(message[name]):
            raise ValueError(f"message {kind!r}: {name!r} is not what it should be: {_short(message.get(name))}")
    for name, check in _OPTIONAL.items():
        if name in message and not check(message[name]):
            raise ValueError(f"message {kind!r}: {name!r} is not what it should be: {_short(message[name])}")
    return message


def read_object(line: bytes) -> dict[str, Any]:
    """Read one JSON object. Raises ValueError for anything else."""
    if len(line) > MOST_BYTES:
        raise ValueError(f"a message of more than {MOST_BYTES} bytes")
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None
    if type(found) is not dict:
        raise ValueError(f"expected a JSON object, got {_short(found)}")
    return found


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
