"""Quantities as people write them: "80 GB", "400 Gb/s", "989.4 TFLOP/s"."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from .errors import PlanError

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_PATTERN = re.compile(
    r"(?P<number>[0-9][0-9_.]*(?:[eE][+-]?\d+)?)\s*"
    r"(?P<prefix>[KMGTP]i|[kKMGTPE])?(?P<unit>B|b|FLOP)?(?P<rate>/s)?"
)
EXAMPLES = {"bytes": "80 GB", "bytes/s": "3.35 TB/s", "FLOP/s": "989.4 TFLOP/s", "count": "8"}


def parse_quantity(text: object, unit: str, name: str) -> float:
    """Return the number that ``text`` gives, in ``unit``: "bytes", "bytes/s", "FLOP/s" or "count".

    "GB" is 10**9 bytes, "GiB" 2**30, "Gb/s" 10**9 bits per second. Raises `PlanError`, which begins with ``name``, for
    a text that cannot be read, has another unit, or is not above 0.
    """
    if unit == "count" and isinstance(text, int) and not isinstance(text, bool) and text >= 1:
        return text
    match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
    value = _in_base_unit(match) if match else None
    if match is None or value is None or _unit_of(match) != unit or value <= 0:
        raise PlanError(f"{name}: expected {_describe_unit(unit)} such as {EXAMPLES[unit]!r}, got {text!r}")
    return value


def parse_count(text: str) -> int:
    """Return the count that a text such as 2783959040, 2.78B, 7.5e9 or 65M gives. Raises `PlanError` unless it is a
    whole number >= 1.
    """
    digits, factor = text.strip().replace("_", "").replace(",", ""), 1
    if digits and digits[-1].upper() in _COUNT:
        digits, factor = digits[:-1], _COUNT[digits[-1].upper()]
    try:
        value = Decimal(digits) * factor
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or value != int(value) or value < 1:
        raise PlanError(f"expected a count such as 2783959040, 2.78B or 65M, got {text!r}")
    return int(value)


def format_quantity(value: float, unit: str) -> str:
    """Return ``value`` as text with three digits, a decimal prefix and ``unit``: format_quantity(80e9, "B")
    is "80 GB".
    """
    for prefix in ("P", "T", "G", "M", "k"):
        if abs(value) >= 0.9995 * _DECIMAL[prefix]:
            return f"{_three_digits(value / _DECIMAL[prefix])} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def _three_digits(value: float) -> str:
    """Return ``value`` as text with three significant digits; without decimals if it is at least 100."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def _in_base_unit(match: re.Match[str]) -> float | None:
    """Return the number of a matched quantity times its prefix, with bits converted to bytes; None if the number cannot
    be read.
    """
    prefix = match["prefix"] or ""
    try:
        value = float(match["number"]) * (_BINARY[prefix] if prefix in _BINARY else _DECIMAL[prefix])
    except ValueError:
        return None
    return value / 8 if match["unit"] == "b" else value


def _unit_of(match: re.Match[str]) -> str:
    """Return the unit of a matched quantity, as `parse_quantity` names it; "" if there is no such unit."""
    if match["unit"] == "FLOP":
        return "FLOP/s" if match["rate"] else ""
    if match["unit"] is None:
        return "" if match["rate"] or match["prefix"] else "count"
    if match["unit"] == "b":
        return "bytes/s" if match["rate"] else ""
    return "bytes/s" if match["rate"] else "bytes"


def _describe_unit(unit: str) -> str:
    """Return the words that `parse_quantity`'s errors use for ``unit``."""
    return {"bytes": "bytes", "bytes/s": "a rate in bytes", "FLOP/s": "operations per second", "count": "a count"}[unit]
