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
