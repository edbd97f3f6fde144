"""All exceptions of this package."""

from __future__ import annotations

__all__ = ["BudgetError", "MissingExtraError", "OffloadError", "ShardCorruptError", "ShardError", "StoreFullError"]


class OffloadError(RuntimeError):
    """Base of the errors of this package."""


class MissingExtraError(OffloadError, ImportError):
    """An optional dependency is not installed; the message has the command that installs it."""


class BudgetError(OffloadError, MemoryError):
    """The needs exceed a limit. The message has the table of needs and limits; ``table`` is that table alone,
    as text.
    """

    def __init__(self, message: str, table: str) -> None:
        super().__init__(message)
        self.table = table


class ShardError(OffloadError):
    """A named tensor could not be read from its tier or written to it; ``message`` says why.

    ``tensor``: the name. ``path``: the file, ``offset_bytes``: the position in it; None where no file is involved.
    """

    def __init__(
        self, message: str, *, tensor: str | None = None, path: str | None = None, offset_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.path = path
        self.offset_bytes = offset_bytes


class ShardCorruptError(ShardError):
    """The file differs from the data written to it: it is too short, or its checksum does not match."""


class StoreFullError(ShardError):
    """There is no room: on the file system, in the user's quota, or in the store's buffers."""
