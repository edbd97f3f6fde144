"""Turn pydantic's validation errors into problems in the user's words."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from zero_settings._prepare import PreparedSource
from zero_settings.errors import Problem, show

_PLAIN = {
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "object": "an object",
}


def explain(error: ValidationError, prepared: PreparedSource) -> list[Problem]:
    """Return pydantic's validation error as problems that name keys as the user wrote them, one per path, in the order
    of the keys.

    ``prepared``: the configuration that was validated."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        path = prepared.as_written(_path_of(detail))
        problem = _problem_of(path, detail)
        earlier = problems.get(path)
        if earlier is not None and problem.expected != earlier.expected:
            either = f"{earlier.expected} or {problem.expected.removeprefix('expected ')}"
            problem = Problem(path, either, earlier.got, earlier.nearest or problem.nearest, earlier.action)
        problems[path] = problem
    # Drop what other members of a union say about a value, where one member has problems inside the value.
    outer = {path for path in problems for deeper in problems if deeper.startswith((f"{path}[", f"{path}."))}
    return [problem for path, problem in problems.items() if path not in outer]


def _path_of(detail: ErrorDetails) -> str:
    """Return the path of the value that one of pydantic's errors is about, in canonical keys (see `PreparedSource`). It
    is the error's location without the names that pydantic adds for members of a union."""
    path = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("bool", "int", "float", "none") and not part[0].isupper():
            path += f".{part}"
    return path.removeprefix(".")


def _problem_of(path: str, detail: ErrorDetails) -> Problem:
    """Return one of pydantic's errors as a `Problem` about the value at ``path``, which has the names that the user
    wrote."""
    context: dict[str, Any] = detail.get("ctx", {})
    kind, value = detail["type"], detail["input"]
    if kind == "unknown_argument":
        nearest = _nearest(context["key"], context["choices"])
        action = "correct it or remove it" if nearest else f"the arguments are {', '.join(context['choices'])}"
        return Problem(f"{path}.{context['key']}", f"expected {detail['msg']}", "an unknown key", nearest, action)
    if kind == "missing":
        return Problem(path, "expected a value: it is required", "nothing")
    if kind == "missing_argument":
        return Problem(path, f"expected {detail['msg']}", show(value))
    expected = _PLAIN.get(kind) or detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if kind == "literal_error":
        expected = expected.replace("False", "false")
    choices = context.get("choices") or _choices_in(context.get("expected", ""))
    nearest = _nearest(value, choices) if isinstance(value, str) else None
    return Problem(path, f"expected {expected}", show(value), nearest, _action_for(kind, value, choices, nearest))


def _action_for(kind: str, value: Any, choices: list[str], nearest: str | None) -> str:
    """Return the advice for a value that pydantic refused; empty if there is none.

    ``kind``: the type of pydantic's error; ``choices``: the valid values, if they can be listed; ``nearest``: the one
    most similar to ``value``, or None."""
    if nearest is not None or not isinstance(value, str):
        return ""
    if value == "auto":
        return 'this key has nobody to fill in "auto": remove it for the default, or write a value'
    if kind in ("number", "integer", "bool_type"):
        return "remove the quotes"
    return f"known are {', '.join(choices)}" if kind == "choice" else ""


def _choices_in(expected: str) -> list[str]:
    """Return the valid values from the text that pydantic lists them in, such as "'a', 'b' or 'c'"."""
    return [choice for part in expected.replace(" or ", ", ").split(", ") if (choice := part.strip("'"))]


def _nearest(value: str, choices: list[str]) -> str | None:
    """Return the choice that is most similar to ``value`` regardless of case, in the choice's own spelling; None if
    none is similar."""
    by_lower = {choice.lower(): choice for choice in reversed(choices)}
    found = difflib.get_close_matches(value.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None
