"""The error of this package, and the checks of arguments that raise it."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


class PlanError(ValueError):
    """Raised for arguments, files and runs that cannot be planned; the message says what was expected."""


def at_least_one(**values: int) -> None:
    """Raise `PlanError`, naming the keyword, for the first of ``values`` that is not an integer of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"{name}: expected an integer >= 1, got {value!r}")


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise `PlanError`, which says "``name``: expected ...", unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise PlanError(f"{name}: expected {', '.join(map(str, allowed))}, got {value!r}{nearest(str(value), allowed)}")


def nearest(word: str, known: Collection[object]) -> str:
    """Return "; did you mean 'X'?" for the item of ``known`` whose spelling is most similar to ``word``; "" if none is
    similar.
    """
    found = get_close_matches(word, [str(each) for each in known], n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""
