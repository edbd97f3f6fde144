"""Errors of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping


class CheckpointError(RuntimeError):
    """A checkpoint operation failed, as `message` says.

    `causes` maps each rank that failed to its own message; None or empty when the failure is not tied to a rank. Every
    rank of a collective save or load raises the error with the same `causes`.
    """

    def __init__(self, message: str, causes: Mapping[int, str] | None = None) -> None:
        self.causes: dict[int, str] = dict(sorted((causes or {}).items()))
        lines = [message, *(f"  rank {rank}: {cause}" for rank, cause in self.causes.items())]
        super().__init__("\n".join(lines))


class DamagedError(CheckpointError):
    """Bytes on disk are not the bytes that were saved (truncated, altered, missing or not valid)."""


class ReplacedError(CheckpointError):
    """The checkpoint was replaced, renamed or removed while it was being read; open it again."""


class NotFoundError(CheckpointError):
    """There is no checkpoint, tag or tensor of that name."""


class MismatchError(CheckpointError):
    """The checkpoint does not fit the request (missing or unexpected names, shapes or dtypes)."""


class NotPlainDataError(CheckpointError):
    """Client state or configuration holds something other than plain data; the message gives its path."""
