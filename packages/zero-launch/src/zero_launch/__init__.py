"""Start one process per rank, here or on many hosts, and tell the truth about how they died."""

from __future__ import annotations

from zero_launch.cli import main
from zero_launch.cluster_launch import launch_cluster
from zero_launch.hostfile import Hostfile
from zero_launch.job import launch
from zero_launch.notebook import notebook_launch
from zero_launch.report import LaunchError, RankFailure
from zero_launch.spec import ClusterSpec, LaunchSpec

__all__ = [
    "ClusterSpec",
    "Hostfile",
    "LaunchError",
    "LaunchSpec",
    "RankFailure",
    "launch",
    "launch_cluster",
    "main",
    "notebook_launch",
]
