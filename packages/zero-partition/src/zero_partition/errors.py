"""Errors of the partitioning runtime."""

from __future__ import annotations


class PartitionError(RuntimeError):
    """The model, the optimizer or a parameter cannot be partitioned as asked; the message names it."""


class ReleasedParameterError(PartitionError):
    """A released parameter was used where it cannot be gathered, written or replaced; the message names it."""


class EditRefusedError(PartitionError):
    """User code changed parameters in a way that the engine cannot adopt; every rank raises it, naming one."""


class NonFiniteGradientError(PartitionError):
    """The gradient norm is not finite, and there is no loss scaling that would skip the step."""


STEP_DROPPED = (
    "The weights were not changed, and the gradients of this step are dropped: call engine.zero_grad() on every rank "
    "and continue with the next batch."
)
"""Rest of a message about a step that every rank refuses because ranks, or param groups, are not as they must be."""


def name_first(first: str, count: int) -> str:
    """Return a phrase for messages that names the first of ``count`` (at least 1) parameters: "parameter 'a'", or
    "parameter 'a' and 2 more"."""
    return f"parameter '{first}'" if count == 1 else f"parameter '{first}' and {count - 1} more"
