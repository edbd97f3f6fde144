"""The names of the package, exactly, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import zero_comm

NAMES = [
    "AlikeStore",
    "Codec",
    "CommError",
    "Connections",
    "Control",
    "DesyncError",
    "EngineGroups",
    "FeedbackAverage",
    "Group",
    "Ledger",
    "LedgerRow",
    "Mesh",
    "Message",
    "NO_STEP",
    "PeerError",
    "QuantizedGather",
    "QuantizedReduce",
    "RankEnvironment",
    "RanksFailedError",
    "Reduction",
    "ReplicatedReduce",
    "SliceSum",
    "Tag",
    "Topology",
    "TreeSum",
    "WeightBucket",
    "WeightInfo",
    "WeightReceiver",
    "WeightSender",
    "WeightServer",
    "WeightServerClient",
    "WeightSlice",
    "Work",
    "all_to_all",
    "await_connections",
    "bucket_offsets",
    "bucket_views",
    "default_device",
    "describe_weights",
    "destroy_group",
    "discover",
    "init",
    "node_name",
    "open_group",
    "plan_buckets",
    "read_weights",
    "run_ranks",
    "starting_together",
    "sum_slices",
    "sum_slices_on_device",
]


def test_the_export_list_is_exact_sorted_and_documented() -> None:
    assert zero_comm.__all__ == NAMES == sorted(NAMES)
    for name in NAMES:
        assert getattr(zero_comm, name).__doc__, name


def test_importing_starts_nothing() -> None:
    code = (
        "import os, sys, threading; before = dict(os.environ); import zero_comm, torch.distributed as dist;"
        "assert not dist.is_initialized() and threading.active_count() == 1 and dict(os.environ) == before;"
        "assert not [m for m in sys.modules if m.startswith('zero_') and m.split('.')[0] != 'zero_comm']"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
