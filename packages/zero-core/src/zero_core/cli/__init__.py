"""The command `zero-core`: look at a configuration, plan memory, verify training. Read `entry.py` first.

Starting it imports neither torch nor pydantic; a command imports what it needs.
"""

from __future__ import annotations

from .entry import main

__all__ = ["main"]
