"""The error of a configuration that cannot be used, and its words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it is, what was expected, what came, and what to do about it."""

    path: str
    expected: str
    got: str
    nearest: str | None = None
    action: str = ""

    def __str__(self) -> str:
        parts = [f"{self.path}: {self.expected}, got {self.got}" if self.got else f"{self.path}: {self.expected}"]
        if self.nearest is not None:
            parts.append(f"did you mean {self.nearest!r}?")
        return "; ".join((*parts, self.action) if self.action else parts)


class ConfigError(ValueError):
    """A configuration that cannot be used, with every problem that was found.

    `problems` holds all of them; `path`, `expected`, `got`, `nearest` and `action` are those of the first. A path names
    keys as the user wrote them: `zero_optimization.stage`, `optimizer.params.betas[1]`.
    """

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        first = problems[0]
        self.path, self.expected, self.got = first.path, first.expected, first.got
        self.nearest, self.action = first.nearest, first.action
        lines = [str(problem) for problem in problems]
        super().__init__(lines[0] if len(lines) == 1 else "\n".join((f"{len(lines)} problems:", *lines)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[Problem, ...]]:
        return type(self), self.problems


def show(value: Any) -> str:
    """Return a short text of a value and, where it helps, its type."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a list of lists of lists
        text = f"a very long {type(value).__name__}"
    if len(text) > 80:
        text = f"{text[:77]}..."
    return f"{text} (a string)" if isinstance(value, str) else text
