"""The error of an invalid configuration, and the problems that it lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration: its path, what was expected, what came, a similar valid value, and advice.

    ``got`` and ``action`` are empty, ``nearest`` is None where there is nothing to say.
    """

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
    """A configuration is not valid; the message lists every problem that was found.

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
    """Return a value as text of about 80 characters at most, for a message; strings are marked as such."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a list of lists of lists
        text = f"a very long {type(value).__name__}"
    if len(text) > 80:
        text = f"{text[:77]}..."
    return f"{text} (a string)" if isinstance(value, str) else text
