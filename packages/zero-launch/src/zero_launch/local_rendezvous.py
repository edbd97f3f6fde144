"""The rendezvous of a job on one machine: a store on the loopback interface, and nobody to wait for.

torch's c10d rendezvous keeps its state as a pickle in its store, which listens on every interface: whoever reaches the
port runs code in the agent. Here nothing that is read from the store is a pickle, and only this machine reaches it.
"""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from zero_launch.sockets import LOOPBACK, open_store


class LocalRendezvous(RendezvousHandler):
    """A `RendezvousHandler` of torch's for one agent, alone; every attempt gets a store
    of its own. ``job_id``: torch's run id."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks use the agent's store."""
        return True

    def get_backend(self) -> str:
        """Return this rendezvous's name, for torch's logs."""
        return "zero-launch-local"

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._job_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a new store for the attempt, and return the rendezvous of this single agent; the store of the attempt
        before closes when nothing refers to it. Raises OSError if this host cannot listen for it.
        """
        self._store = open_store(LOOPBACK, 0)
        info = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("zero-launch", self._store), 0, 1, info)

    def num_nodes_waiting(self) -> int:
        """Return 0: no other agent ever waits."""
        return 0

    def is_closed(self) -> bool:
        """Return False: nothing closes the rendezvous while its agent runs."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other agent to tell."""

    def shutdown(self) -> bool:
        """Drop the store; return True, as torch asks."""
        self._store = None
        return True
