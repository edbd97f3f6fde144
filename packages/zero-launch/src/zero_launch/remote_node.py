"""Any node but the first of a job in which every node has its own command line (`--no_ssh`, Slurm, Kubernetes)."""

from __future__ import annotations

import queue

from zero_launch.channel import Channel
from zero_launch.connection import connect
from zero_launch.facts import greeting
from zero_launch.handshake import Refused
from zero_launch.host import HostSide
from zero_launch.messages import FROM_LAUNCHER, Message
from zero_launch.nodes import Node
from zero_launch.report import LaunchError
from zero_launch.requeue import LeftEarly
from zero_launch.spec import LaunchSpec

_CONNECT_SECONDS = 120.0


def join(node: Node, spec: LaunchSpec, token: str) -> None:
    """Run ``spec`` on this node, led by node 0, and return when all ranks of the job have ended with status 0.

    ``node``: this node, and where node 0 listens. ``token``: shared by all nodes.

    Raises ConnectionError when node 0 does not answer within 2 minutes, does not let this node take part, or is lost on
    the way; LaunchError when the job failed; and LeftEarly when its ranks have saved and left (under Slurm it returns
    then). Node 0 reports what happened. The ConnectionError of a node that may not take part is `Refused`.
    """
    inbox: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
    about = {"node_rank": node.rank, "nproc": spec.nproc}
    connection = connect(node.address, node.port, _CONNECT_SECONDS, token=token, about=about, quiet=spec.quiet)
    channel = Channel(
        "launcher", connection.reader, connection.writer, inbox, kinds=FROM_LAUNCHER, seal=connection.seal
    ).start()
    channel.send("hello", **{**greeting(), "address": connection.own_address})
    hand = HostSide(channel, inbox)
    if hand.run(spec) != 0:
        if hand.refusal is not None:
            raise Refused(f"node 0 ({node.address}) does not let this node take part: {hand.refusal}")
        if hand.cut_off is not None:
            raise ConnectionError(
                f"node 0 ({node.address}) counts this node as lost: {hand.cut_off}. The job goes on without it if "
                "enough nodes are left; node 0 says so"
            )
        raise LaunchError([], spec.nproc, [f"node 0 ({node.address}) reports why"])
    if hand.left and node.source != "Slurm":  # srun would end node 0, which puts the job back into the queue
        raise LeftEarly(leads=False)
