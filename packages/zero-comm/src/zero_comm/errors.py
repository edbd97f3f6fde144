"""Errors between ranks."""

from __future__ import annotations


class CommError(RuntimeError):
    """A collective failed; the message names its tag."""


class PeerError(CommError):
    """Another rank failed, left or did not answer; the message names the rank and, if it reported one, its reason."""


class DesyncError(CommError):
    """Ranks made different calls at the same point; the message lists each rank's call."""
