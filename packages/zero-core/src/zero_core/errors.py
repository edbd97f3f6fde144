"""Errors of the composed engine."""

from __future__ import annotations


class UsageError(ValueError):
    """A call or argument that cannot work; the message names it, says what was expected, and what to do instead."""


class AuditError(RuntimeError):
    """Ranks hold values that differ where they must agree (`audit_every`); names rank, parameter and step."""
