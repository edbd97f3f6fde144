"""Where the numbers of a run are written: CSV files, TensorBoard, Weights & Biases, Comet.

Read `protocol.py` first. A client is imported when its section of the configuration is enabled, on rank 0 alone.
"""

from __future__ import annotations

from .build import build_monitor, check_clients
from .protocol import Event, Monitor, Monitors, NoMonitor

__all__ = ["Event", "Monitor", "Monitors", "NoMonitor", "build_monitor", "check_clients"]
