"""One step of a collective operation: every rank does its part, then all know who failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .errors import CheckpointError
from .types import Coordinator

T = TypeVar("T")


def run_on_all_ranks(coordinator: Coordinator, what: str, part: Callable[[], T]) -> list[T]:
    """Run `part` on every rank and return the results (plain data) of all, in rank order; collective.

    `what` names the operation in errors. If `part` raises on any rank, every rank raises a CheckpointError with the
    cause of each failed rank, chained to its own exception if it has one. The error is of the subclass that the failed
    ranks agree on, if they do. An interrupt (any exception that is no `Exception`) is raised again unchanged on the
    rank where it came up.
    """
    own: BaseException | None = None
    result: Any = None
    try:
        result = part()
    except BaseException as error:  # an interrupt too: the other ranks wait for an answer
        own = error
    try:
        answers = coordinator.all_gather_object([None if own is None else _describe(own), result])
    except Exception as error:
        cause = f"the ranks could not agree, one may be gone: {error}"
        if own is not None:  # its reason may be that the others have given up
            cause = f"{_describe(own)[1]}; and {cause}"
        raise CheckpointError(f"{what} failed", {coordinator.rank: cause}) from (own or error)
    if own is not None and not isinstance(own, Exception):
        raise own
    causes = {rank: answer[0] for rank, answer in enumerate(answers) if answer[0] is not None}
    if not causes:
        return [answer[1] for answer in answers]
    names = {cause[0] for cause in causes.values()}
    kind = _TYPES.get(names.pop(), CheckpointError) if len(names) == 1 else CheckpointError
    raise kind(f"{what} failed", {rank: cause[1] for rank, cause in causes.items()}) from own


def _describe(error: BaseException) -> list[str]:
    """Return [name of the type, message] of an exception; the message of one that is no CheckpointError begins with its
    type."""
    name = type(error).__name__
    return [name, str(error) if isinstance(error, CheckpointError) else f"{name}: {error}"]


def _error_types(kind: type[CheckpointError]) -> dict[str, type[CheckpointError]]:
    """Return `kind` and all its subclasses, by class name."""
    found = {kind.__name__: kind}
    for child in kind.__subclasses__():
        found.update(_error_types(child))
    return found


_TYPES = _error_types(CheckpointError)
