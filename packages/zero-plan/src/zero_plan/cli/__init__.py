"""The command `zero-plan`; read `entry.py` first."""

from __future__ import annotations

from .entry import main, parser

__all__ = ["main", "parser"]
