"""The ranks of each node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """``nodes[r]`` names the node of a group's rank r; an empty one says that all ranks are on one node."""

    nodes: tuple[str, ...] = ()

    def far_peers(self, rank: int) -> int:
        """Return the number of ranks that are on another node than ``rank``."""
        return sum(node != self.nodes[rank] for node in self.nodes)

    def of(self, ranks: Sequence[int]) -> Topology:
        """The topology of a smaller group, given its members' ranks in this one."""
        return Topology(tuple(self.nodes[rank] for rank in ranks)) if self.nodes else self

    def block(self, world_size: int) -> int:
        """The largest divisor of ``world_size`` such that consecutive blocks of so many ranks lie inside one node."""
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
    """The node of this process, whose global rank is ``rank``; equal names mean the same node.

    With ``ranks_per_node`` the ranks are dealt out in order, so many to a node, wherever they run. Otherwise torchrun's
    and zero-launch's LOCAL_RANK decides (ranks of a node follow one another there), and without it the host's name.
    """
    env = os.environ if environ is None else environ
    if ranks_per_node is not None:
        return f"node {rank // ranks_per_node}"
    if env.get("RANK") == str(rank) and "LOCAL_RANK" in env and "LOCAL_WORLD_SIZE" in env:
        return f"from rank {rank - int(env['LOCAL_RANK'])}"
    return socket.gethostname()
