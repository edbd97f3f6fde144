"""The few collectives that ZeRO needs, over torch.distributed, with their bytes counted.

Read `group.py` first: it holds the all-gather, the reduce-scatter and the broadcast.
"""

from __future__ import annotations

from .alike import AlikeStore
from .connections import Connections
from .control import Control
from .device_slices import sum_slices_on_device
from .differentiable import all_to_all
from .discovery import RankEnvironment, discover
from .errors import CommError, DesyncError, PeerError
from .feedback import FeedbackAverage
from .group import Group
from .leaving import destroy_group
from .ledger import Ledger, LedgerRow
from .mesh import Mesh
from .message import Message
from .packets import Codec
from .process_groups import EngineGroups, open_group
from .quantized import QuantizedGather, QuantizedReduce
from .replicated import Reduction, ReplicatedReduce
from .setup import await_connections, default_device, init
from .slices import SliceSum, TreeSum, sum_slices
from .starting import starting_together
from .tag import NO_STEP, Tag
from .testing import RanksFailedError, run_ranks
from .topology import Topology, node_name
from .weight_server import WeightServer, WeightServerClient
from .weight_transfer import WeightReceiver, WeightSender
from .weights import (
    WeightBucket,
    WeightInfo,
    WeightSlice,
    bucket_offsets,
    bucket_views,
    describe_weights,
    plan_buckets,
    read_weights,
)
from .work import Work

__all__ = [
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
