"""A rendezvous for torch's elastic agent in which the launcher, which knows all hosts, forms every round.

torch's own rendezvous finds its members through a store on one of them: when that member's link is down, every agent
hangs in the store's timeouts, and ranks are numbered by address. Here membership travels on the launcher's channels, a
lost host is known within seconds, and ranks follow the host list. The store of the ranks is torch's TCPStore, on the
first host, fresh for every attempt.
"""

from __future__ import annotations

import queue
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from zero_launch.channel import Channel
from zero_launch.messages import Message, no_report
from zero_launch.sockets import STORE_SECONDS, open_store


class LedRendezvous(RendezvousHandler):
    """A `RendezvousHandler` of torch's for one host's agent; the launcher leads it through ``channel``. ``job_id``:
    torch's run id.

    Per attempt: we say `ready`; the first host gets `serve`, opens the store and says `store`; everyone gets `round`
    with the store's address. `restart` makes the agent come back here.
    """

    def __init__(self, channel: Channel, job_id: str) -> None:
        self._channel = channel
        self._job_id = job_id
        self.orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        """The launcher's messages about rounds; the reader of the channel puts them here."""
        self.attempt = 0
        """The number of the attempt that runs: 0, then one more with each restart."""
        self.place = (0, 0)
        """The first rank of this host, and the number of ranks of the job."""
        self.report: Message = no_report()
        """What became of the ranks of the attempt that just ended; goes out with `ready`."""
        self.restart_asked = False
        self._server: TCPStore | None = None

    def take(self, message: Message) -> bool:
        """Handle a message of the launcher about rounds, and return True: note `restart`, and queue `serve` and `round`
        for `next_rendezvous`; a `round` ends an earlier `restart`. Return False, and do nothing, for any other
        message."""
        if message["kind"] == "restart":
            self.restart_asked = True
        elif message["kind"] in ("serve", "round"):
            if message["kind"] == "round":  # what came before it was about earlier attempts
                self.restart_asked = False
            self.orders.put(message)
        else:
            return False
        return True

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks use the agent's store."""
        return True

    def get_backend(self) -> str:
        """Return this rendezvous's name, for torch's logs."""
        return "zero-launch"

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._job_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Send `ready` with the report of the attempt before, wait until all hosts are, and return the round for
        torch's agent.

        Hosts are numbered in the host list's order. Blocks without limit: the launcher ends this process if there is no
        round.
        """
        self._server = None
        self._channel.send("ready", **self.report)
        self.report = no_report()
        order = self.orders.get()
        if order["kind"] == "serve":
            self._serve(order["address"], order["port"])
            order = self.orders.get()
        self.attempt, self.place = order["attempt"], (order["first"], order["ranks"])
        address, port = order["address"], order["port"]
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
        info = RendezvousStoreInfo(address, port)
        return RendezvousInfo(PrefixStore("zero-launch", store), order["group_rank"], order["groups"], info)

    def _serve(self, address: str, port: int) -> None:
        """Open the ranks' store at ``address`` and ``port`` (0: a free one) here, and send the launcher its port.
        Raises OSError if this host cannot listen there."""
        self._server = open_store(address, port)
        self._channel.send("store", port=self._server.port)

    def num_nodes_waiting(self) -> int:
        """Return 1, for which torch's agent restarts its ranks, if the launcher has asked for a restart; else 0."""
        return int(self.restart_asked)

    def is_closed(self) -> bool:
        """Return False: the launcher ends the agent instead."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the launcher decides when the job is over."""

    def shutdown(self) -> bool:
        """Drop the store, if it is here; return True, as torch asks."""
        self._server = None
        return True
