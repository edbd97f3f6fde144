"""A node of a job in which every node has its own command line (`--no_ssh`, Slurm): all but the first."""

from __future__ import annotations

import queue

from zero_launch.channel import Channel, Message
from zero_launch.facts import greeting
from zero_launch.host import Hand, connect
from zero_launch.nodes import Node
from zero_launch.report import LaunchError
from zero_launch.spec import LaunchSpec

_CONNECT_SECONDS = 120.0


def join(node: Node, spec: LaunchSpec) -> None:
    """Run ``spec`` on this node, led by node 0.

    Raises ConnectionError when node 0 does not answer, and LaunchError when the job failed; what happened is reported
    by node 0.
    """
    inbox: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
    reader, writer = connect(node.address, node.port, _CONNECT_SECONDS)
    channel = Channel("launcher", reader, writer, inbox)
    channel.send("hello", node_rank=node.rank, nproc=spec.nproc, **greeting())
    if Hand(channel, inbox).run(spec) != 0:
        raise LaunchError([], spec.nproc, [f"node 0 ({node.address}) reports why"])
