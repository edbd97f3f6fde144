"""Errors of the composed engine."""

from __future__ import annotations


class UsageError(ValueError):
    """A call or an argument that cannot work; the message names it, what was expected and what to do."""


class AuditError(RuntimeError):
    """Ranks hold something else than they must (`audit_every`); the message names rank, parameter and step."""
