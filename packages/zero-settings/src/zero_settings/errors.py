"""The error of an invalid configuration, and the problems that it lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MOST_CHARACTERS, _MOST_LINES = 300, 50
"""Of a path in a message, and of problems in one."""


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration: the path of the value, what was expected, what was found, a similar valid value,
    and advice.

    ``got`` and ``action`` are empty, ``nearest`` is None where there is nothing to say. ``str(problem)`` is one line of
    text."""

    path: str
    expected: str
    got: str
    nearest: str | None = None
    action: str = ""

    def __str__(self) -> str:
        path = self.path if len(self.path) <= _MOST_CHARACTERS else f"{self.path[: _MOST_CHARACTERS - 3]}..."
        parts = [f"{path}: {self.expected}, got {self.got}" if self.got else f"{path}: {self.expected}"]
        if self.nearest is not None:
            parts.append(f"did you mean {self.nearest!r}?")
        return "; ".join((*parts, self.action) if self.action else parts)


class ConfigError(ValueError):
    """A configuration is not valid; the message lists the problems that were found, 50 at most.

    `problems` holds all of them; `path`, `expected`, `got`, `nearest` and `action` are those of the first. A path names
    keys as the user wrote them: `zero_optimization.stage`, `optimizer.params.betas[1]`.
    """

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        first = problems[0]
        self.path, self.expected, self.got = first.path, first.expected, first.got
        self.nearest, self.action = first.nearest, first.action
        lines = [str(problem) for problem in problems[:_MOST_LINES]]
        if len(problems) > _MOST_LINES:
            lines.append(f"and {len(problems) - _MOST_LINES} more")
        super().__init__(lines[0] if len(lines) == 1 else "\n".join((f"{len(problems)} problems:", *lines)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[Problem, ...]]:
        """Return the class and the problems, from which pickle builds an equal error."""
        return type(self), self.problems


def show(value: Any) -> str:
    """Return the `repr` of a value for a message, cut after about 80 characters; strings are marked as such."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a list of lists of lists
        text = f"a very long {type(value).__name__}"
    if len(text) > 80:
        text = f"{text[:77]}..."
    return f"{text} (a string)" if isinstance(value, str) else text
