"""The assignment of ranks to nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The node of each rank of a group: ``nodes[r]`` names rank r's; empty ``nodes`` mean that all ranks share one."""

    nodes: tuple[str, ...] = ()

    def far_peers(self, rank: int) -> int:
        """Return the number of ranks of the group that are on other nodes than ``rank``; 0 for empty ``nodes``."""
        return len(self.nodes) - self.nodes.count(self.nodes[rank]) if self.nodes else 0

    def subset(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of a smaller group. ``ranks``: its members, in its order, by their numbers in this
        group."""
        return Topology(tuple(self.nodes[rank] for rank in ranks)) if self.nodes else self

    def block_size(self, world_size: int) -> int:
        """Return the size of the largest blocks, a divisor of ``world_size``, into which the group's ranks can be
        divided in order so that no block spans two nodes. ``world_size``: ranks of the group."""
        if not self.nodes:
            return world_size
        return max(
            size
            for size in range(1, world_size + 1)
            if world_size % size == 0
            and all(len(set(self.nodes[start : start + size])) == 1 for start in range(0, world_size, size))
        )


ONE_NODE = Topology()


def node_name(rank: int, ranks_per_node: int | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Return a name for the node of the process with global rank ``rank``; equal names mean the same node.

    With ``ranks_per_node`` each so many consecutive ranks count as one node, wherever they run. Otherwise ``rank`` must
    be this process, and the name follows from LOCAL_RANK as torchrun and zero-launch set it (there, a node's ranks are
    consecutive) or, if that is not set, is the host name. ``environ``: default os.environ.
    """
    env = os.environ if environ is None else environ
    if ranks_per_node is not None:
        return f"node {rank // ranks_per_node}"
    if env.get("RANK") == str(rank) and "LOCAL_RANK" in env and "LOCAL_WORLD_SIZE" in env:
        return f"from rank {rank - int(env['LOCAL_RANK'])}"
    return socket.gethostname()
