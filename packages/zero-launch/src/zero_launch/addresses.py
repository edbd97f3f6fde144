"""The address by which each host of a job is reached, and that of the store (torch's TCPStore) at which its ranks
meet."""

from __future__ import annotations

from zero_launch.peers import Peer
from zero_launch.sockets import LOOPBACK
from zero_launch.spec import ClusterSpec


class Addresses:
    """The addresses of one job that the launcher knows, as ``spec`` and the hosts' hellos (first messages) name
    them."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self.listening = ""
        """The address at which this process listens for nodes that connect by themselves; empty while it does not."""

    def of_launcher(self) -> str:
        """Return the address at which this process is to listen for nodes that connect by themselves: the job's bind
        address (`--bind_addr`), else its master address, else the loopback address."""
        return self._spec.bind_address or self._spec.master_address or LOOPBACK

    def of_local_host(self, peer: Peer) -> str:
        """Return the address of ``peer`` if the launcher started it on this machine; empty for a remote host, which
        reports its own address in its hello."""
        here = peer.name in self._spec.hosts.hosts and self._spec.transport.launcher == "local"
        return (self.listening or LOOPBACK) if here else ""

    def of_store(self, peer: Peer) -> str:
        """Return the address at which the ranks reach their store, which ``peer`` opens: the job's master address, else
        the address at which ``peer`` is reached. Call it after the host's hello."""
        return self._spec.master_address or self.of_local_host(peer) or peer.hello["address"] or LOOPBACK
