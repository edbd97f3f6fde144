"""By which address each host of a job is reached, and where the ranks' store is."""

from __future__ import annotations

from zero_launch.peers import Peer
from zero_launch.sockets import LOOPBACK
from zero_launch.spec import ClusterSpec


class Addresses:
    """The addresses of one job, as far as the launcher can know them."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self.listening = ""
        """Where this process listens for nodes that come by themselves."""

    def of_launcher(self) -> str:
        """Where this process is to listen for nodes that come by themselves."""
        return self._spec.bind_address or self._spec.master_address or LOOPBACK

    def of(self, peer: Peer) -> str:
        """The address of a host that is this machine; empty for another, which knows its own."""
        here = peer.name in self._spec.hosts.hosts and self._spec.transport.launcher == "local"
        return (self.listening or LOOPBACK) if here else ""

    def of_store(self, peer: Peer) -> str:
        """Where the ranks find their store, which is on this host."""
        return self._spec.master_address or self.of(peer) or peer.hello["address"] or LOOPBACK
