"""Shapes of a record's JSON: what a line or `failure.json` must look like to be read; see [Note: record format 1]."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from .schema import SpanKind

_KINDS = frozenset(int(kind) for kind in SpanKind)
_LARGEST = 1e300


def load_json(body: bytes) -> Any:
    """Return the value of the JSON text ``body``. Raises ValueError if it is no JSON, or nested too deeply."""
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number that a float can hold, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def is_count(value: Any) -> bool:
    """Return whether ``value`` is an integer that a float can hold, possibly negative, and no boolean."""
    return isinstance(value, int) and is_number(value)


def is_note(value: Any) -> bool:
    """Return whether ``value`` can be a note, a dict with a kind and a time, in which the facts that readers use have
    the right types."""
    if not isinstance(value, dict) or not isinstance(value.get("note"), str) or not is_number(value.get("at")):
        return False
    kind = value["note"]
    numbers = {"checkpoint": ("bytes", "seconds", "blocked_s"), "plan": ("bytes",)}.get(kind, ())
    return (
        _all_fit(value, is_count, "step", "of_step")
        and all(value.get(name) is None or is_number(value[name]) for name in numbers)
        and (kind != "peak" or is_number(value.get("bytes_per_second")))
    )


def is_head(value: Any) -> bool:
    """Return whether ``value`` can be a head: a note of kind "head" in which schema, world size, begin and facts have
    the right types."""
    if not is_note(value) or value["note"] != "head":
        return False
    facts = value.get("facts", {})
    return (
        _all_fit(value, is_count, "schema")
        and _all_fit(value, lambda size: is_count(size) and size > 0, "world_size")
        and _all_fit(value, is_number, "began")
        and isinstance(facts, dict)
        and _all_fit(facts, lambda rows: isinstance(rows, list), "configuration")
        and _all_fit(facts, lambda found: isinstance(found, dict), "machine", "versions")
    )


def is_block(value: Any) -> bool:
    """Return whether ``value`` can be the spans of a step in the timeline: a dict with the right types, and spans of
    known kinds."""
    if not isinstance(value, dict) or not all(is_count(value.get(name)) for name in ("step", "us", "left_out")):
        return False
    names, spans, memory = (value.get(name) for name in ("names", "spans", "memory"))
    return (
        is_number(value.get("began"))
        and _all_fit(value, is_count, "under_way")
        and _all_fit(value, lambda state: isinstance(state, bool), "open")
        and isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and isinstance(spans, list)
        and len(spans) % 6 == 0
        and all(type(number) is int for number in spans)
        and _KINDS.issuperset(spans[::6])
        and all(0 <= index < len(names) for index in spans[1::6])
        and isinstance(memory, list)
        and all(map(_is_memory, memory))
    )


def failure_fault(value: Any) -> str:
    """Return words that say what is wrong with ``value``, the content of `failure.json`; empty if nothing is."""
    if not isinstance(value, dict):
        return f"expected an object, got {_short_json(value)}"
    for name, wanted, fits in (
        ("at", "a number of Unix seconds", is_number),
        ("text", "a string", lambda text: isinstance(text, str)),
        ("detail", "a string", lambda text: isinstance(text, str)),
        ("interrupted", "true or false", lambda flag: isinstance(flag, bool)),
        ("flight", "an array of objects, each with an array as last", _is_flight),
    ):
        if name in value and not fits(value[name]):
            return f"expected {wanted} under {name!r}, got {_short_json(value[name])}"
    return ""


def _all_fit(value: Mapping[str, Any], fits: Callable[[Any], bool], *names: str) -> bool:
    """Return whether ``fits`` returns True for each value that ``value`` has under ``names``; absent names are passed
    over."""
    return all(fits(value[name]) for name in names if name in value)


def _is_memory(value: Any) -> bool:
    """Return whether ``value`` is a pair of microseconds and bytes by owner."""
    pair = isinstance(value, list) and len(value) == 2 and is_number(value[0]) and isinstance(value[1], dict)
    return pair and all(map(is_number, value[1].values()))


def _is_flight(value: Any) -> bool:
    """Return whether ``value`` can be the ranks' last collectives in `failure.json`: a list of dicts whose `last` is a
    list or absent."""
    return isinstance(value, list) and all(
        isinstance(row.get("last") or [], list) for row in value if isinstance(row, dict)
    )


def _short_json(value: Any) -> str:
    """Return ``value`` as JSON, shortened to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
