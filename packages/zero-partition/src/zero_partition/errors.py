"""Errors of the partitioning runtime."""

from __future__ import annotations


class PartitionError(RuntimeError):
    """The model, the optimizer or a parameter cannot be partitioned as asked; the message names it."""


class ReleasedParameterError(PartitionError):
    """A released parameter was used where it cannot be gathered, written or replaced; the message names it."""


class EditRefusedError(PartitionError):
    """Parameters were changed in a way that cannot be taken over; every rank raises it, and the message names one."""


class NonFiniteGradientError(PartitionError):
    """The gradient norm is not finite and no loss scale is there to skip the step."""
