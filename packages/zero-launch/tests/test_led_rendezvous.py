"""The rendezvous that the launcher leads: what it says of one attempt ends no other."""

from __future__ import annotations

import os
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from zero_launch.channel import Channel
from zero_launch.messages import FROM_HOST, FROM_LAUNCHER
from zero_launch.rendezvous import LedRendezvous
from zero_launch.sockets import LOOPBACK


def test_a_restart_that_comes_when_the_host_has_begun_it_by_itself_does_not_restart_the_next_attempt() -> None:
    pipes = [os.pipe(), os.pipe()]
    inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    host = Channel(
        "launcher", os.fdopen(pipes[0][0], "rb"), os.fdopen(pipes[1][1], "wb"), inboxes[0], kinds=FROM_LAUNCHER
    ).start()
    launcher = Channel(
        "host", os.fdopen(pipes[1][0], "rb"), os.fdopen(pipes[0][1], "wb"), inboxes[1], kinds=FROM_HOST
    ).start()
    rendezvous = LedRendezvous(host, "job")
    with ThreadPoolExecutor(1) as pool:
        began = pool.submit(rendezvous.next_rendezvous)
        assert inboxes[1].get(timeout=5)[1]["kind"] == "ready"
        assert rendezvous.take({"kind": "restart"})  # the launcher had not heard yet that this host is ready
        assert rendezvous.take({"kind": "serve", "address": LOOPBACK, "port": 0})
        place = {"attempt": 1, "group_rank": 0, "groups": 1, "first": 0, "ranks": 1, "address": LOOPBACK}
        assert rendezvous.take({"kind": "round", **place, "port": inboxes[1].get(timeout=5)[1]["port"]})
        began.result(timeout=10)
    assert rendezvous.num_nodes_waiting() == 0
    assert rendezvous.take({"kind": "restart"})
    assert rendezvous.num_nodes_waiting() == 1
    rendezvous.shutdown()
    for channel in (host, launcher):
        channel.close()
