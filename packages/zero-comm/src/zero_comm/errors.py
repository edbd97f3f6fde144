"""Errors between ranks."""

from __future__ import annotations


class CommError(RuntimeError):
    """A collective could not be carried out; the message names its tag."""


class PeerError(CommError):
    """Another rank failed or left; the message names the rank and, when it told, the cause."""


class DesyncError(CommError):
    """Ranks asked for different things at the same point; the message lists what each asked for."""
