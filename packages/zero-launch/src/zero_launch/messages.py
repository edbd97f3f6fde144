"""Messages between the launcher and its agents on the hosts: every kind, with a check for each of its fields.

A check is a function that returns whether a value decoded from JSON may stand in a field. The private functions are
such checks, or return one; the private constants are checks for the fields of the tables `FROM_HOST` and
`FROM_LAUNCHER`.

`decode` checks what comes over a connection before any code uses it, so that a malformed message costs the connection
to its sender instead of crashing the receiver.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]
Check = Callable[[Any], bool]
"""Returns whether a value that was decoded from JSON may stand in a field."""
MAX_MESSAGE_BYTES = 16 << 20
"""Bound on a message's line; long output of ranks is sent in several messages."""
_MAX_NUMBER = 1 << 62


def _of_type(kind: type) -> Check:
    """Return a check for values of exactly ``kind``, not of a subclass."""
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
    """Return whether ``value`` is an int or a float, but no bool, below 2**62 in size."""
    return type(value) in (int, float) and -_MAX_NUMBER < value < _MAX_NUMBER


def _time(value: Any) -> bool:
    """Return whether ``value`` is a time in seconds since the epoch, within the years that calendars support."""
    return _number(value) and 0 <= value < 1 << 37


def _integer(value: Any) -> bool:
    """Return whether ``value`` is an int, but no bool, below 2**62 in size."""
    return type(value) is int and _number(value)


def _natural(value: Any) -> bool:
    """Return whether ``value`` is an integer of at least 0."""
    return _integer(value) and bool(value >= 0)


def _within(least: int, most: int) -> Check:
    """Return a check for integers from ``least`` to ``most``, both included."""
    return lambda value: type(value) is int and least <= value <= most


def _or_none(check: Check) -> Check:
    """Return a check for None and for values that pass ``check``."""
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    """Return a check for lists whose values all pass ``check``."""
    return lambda value: type(value) is list and all(map(check, value))


def _object_of(check: Check, *, key: Check) -> Check:
    """Return a check for objects whose values all pass ``check`` and whose keys pass ``key``."""
    return lambda value: type(value) is dict and all(key(k) and check(v) for k, v in value.items())


def _row(*checks: Check) -> Check:
    """Return a check for lists that have as many values as there are ``checks``, each of which passes its check."""

    def passes(value: Any) -> bool:
        """Return whether ``value`` is a list of the right length whose values pass their checks."""
        return (
            type(value) is list and len(value) == len(checks) and all(c(v) for c, v in zip(checks, value, strict=True))
        )

    return passes


def _fields(**checks: Check) -> Check:
    """Return a check for objects with at least these fields, each of which passes its check."""
    return lambda value: (
        type(value) is dict and all(name in value and check(value[name]) for name, check in checks.items())
    )


def _anything(value: Any) -> bool:
    """Return True: any value passes."""
    return True


def _rank_key(key: Any) -> bool:
    """Return whether ``key`` is a rank as a key of a JSON object: a string of at most 9 digits."""
    return type(key) is str and key.isascii() and key.isdigit() and len(key) < 10


_flag, _texts = _of_type(bool), _list_of(_text)
_entry = _row(_natural, _natural, _integer, _integer, _text, _text, _text, _text)
_record = _fields(entries=_list_of(_entry), started=_natural, finished=_natural, waiting=_natural, failed=_natural)
_records = _object_of(_record, key=_rank_key)
_port = _within(0, 65535)
_failure = _fields(
    rank=_natural,
    host=_text,
    pid=_natural,
    exit_code=_or_none(_integer),
    cause=_text,
    detail=_text,
    seconds=_number,
    step=_or_none(_natural),
    at=_number,
)
_failures = _list_of(_failure)
_ended = _list_of(_row(_natural, _time))
_variables = _object_of(_text, key=_text)
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
    open_files=_integer,
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
    participants=_list_of(_row(_node, _natural)),
    waiting=_list_of(_node),
    redundant=_list_of(_node),
    heartbeats=_list_of(_row(_node, _time)),
)
_imports = _object_of(_text, key=_rank_key)
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
    "started": {"pids": _object_of(_natural, key=_rank_key)},
    "lines": {"stream": lambda value: value in ("stdout", "stderr"), "text": _text},
    "failed": {"attempt": _natural, "divergence": _or_none(_text)},
    "stalled": {"stalled": _flag, "records": _records},
    "notice": {"text": _text},
    "presence": {"attempt": _natural, "arrived": _list_of(_natural), "ended": _list_of(_natural)},
    "asked": {},
    "done": {},
    "ended": {"failed": _flag, "failures": _failures, "fates": _texts, "notes": _texts, "records": _records},
    "refused": {"why": _text},
}
"""Kinds of messages that a host sends -> field -> its check; all fields are required."""
FROM_LAUNCHER: Mapping[str, Mapping[str, Check]] = {
    "beat": {},
    "examine": {"mark": _or_none(_text)},
    "job": {
        "job_id": _text,
        "spec": _object_of(_anything, key=_text),
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
"""Kinds of messages that the launcher sends -> field -> its check; all fields are required."""
_OPTIONAL: Mapping[str, Check] = {
    "divergence": _or_none(_text),
    "folder": _text,
    "left": _or_none(_text),
    "why": _or_none(_text),
}
"""Fields that any message may have beyond those -> their checks."""


def no_report() -> Message:
    """Return the fields of the message `ready` (see `FROM_HOST`) of a host that has run no attempt yet."""
    return {"failures": [], "ended": [], "records": {}}


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the message as one line of JSON, without the newline. Raises TypeError for what JSON does not have."""
    return json.dumps(message).encode()


def decode(line: bytes, kinds: Mapping[str, Mapping[str, Check]]) -> Message:
    """Return the message in a line of JSON after checking its `kind`, its time of sending `at` and the kind's fields.

    ``kinds``: the messages that are allowed, as in `FROM_HOST`. Fields that the kind does not have pass unchecked.
    Raises ValueError, which says what is wrong, if a check fails.
    """
    message = read_object(line)
    kind = message.get("kind")
    if type(kind) is not str or kind not in kinds:
        raise ValueError(f"no such kind of message: {_shortened(kind)}")
    if not _number(message.get("at")):
        raise ValueError(f"message {kind!r} has no time")
    for name, check in kinds[kind].items():
        if name not in message or not check(message[name]):
            raise ValueError(f"message {kind!r}: {name!r} is not what it should be: {_shortened(message.get(name))}")
    for name, check in _OPTIONAL.items():
        if name in message and not check(message[name]):
            raise ValueError(f"message {kind!r}: {name!r} is not what it should be: {_shortened(message[name])}")
    return message


def read_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object in ``line``. Raises ValueError for anything else, or if it
    has more than `MAX_MESSAGE_BYTES`."""
    if len(line) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None
    if type(found) is not dict:
        raise ValueError(f"expected a JSON object, got {_shortened(found)}")
    return found


def _shortened(value: Any) -> str:
    """Return ``value`` as text for an error message, cut at 80 characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
