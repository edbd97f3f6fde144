"""Every socket that this package listens on, bound to one address; and the ranks' store on such a socket."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
STORE_SECONDS = 60
_BACKLOG = 4096
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""How gloo, NCCL and tensorpipe are told the interface on which they listen."""


def listen(address: str, port: int, purpose: str) -> socket.socket:
    """Listen on ``address`` alone, and return the socket; port 0 takes a free one. ``purpose`` names the socket in an
    error.

    Raises OSError, with what to do, when this host cannot listen there, and when ``address`` is a name that means the
    loopback interface on this host, where no other host could come.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if is_loopback(str(target[0])) and address != "localhost" and not is_loopback(address):
            raise OSError(errno.EADDRNOTAVAIL, f"{address} is {target[0]} on this host, where no other host can come")
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(target)
            server.listen(_BACKLOG)
        except BaseException:
            server.close()
            raise
    except OSError as error:
        raise OSError(
            f"cannot listen on {address} port {port} for {purpose}: {error.strerror or error}; {_listen_advice(error)}"
        ) from error
    return server


def _listen_advice(error: OSError) -> str:
    """Return advice for the user about ``error`` of `listen`: to choose another port, or one of this host's
    addresses."""
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return "choose another port with --master_port"
    have = ", ".join(own_addresses())
    return (
        f"this host has {have}: give the one by which other hosts reach it with --master_addr or, "
        "where they reach it by another (address translation), one of these with --bind_addr"
    )


def open_store(address: str, port: int) -> TCPStore:
    """Open the ranks' store at ``address`` alone; port 0 takes a free one, which is then the store's `port`.

    Raises OSError, with what to do, if this host cannot listen there.
    """
    from torch._C._distributed_c10d import TCPStore

    server = listen(address, port, "the ranks' store")
    # torch binds to every interface by itself; the socket that it is handed is its own from here on.
    return TCPStore(
        address,
        server.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS),
        master_listen_fd=server.detach(),
    )


def is_loopback(address: str) -> bool:
    """Return whether ``address`` is a loopback IP address; False for host names."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def own_addresses() -> list[str]:
    """Return the IPv4 and IPv6 addresses of this host, loopback ones last."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    found = [e.address for entries in psutil.net_if_addrs().values() for e in entries if e.family in families]
    return sorted(found, key=is_loopback)


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with the IP address ``address``; None if this host has none."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    return None


def interface_variables(address: str) -> dict[str, str]:
    """Return the variables (name -> interface) that tell the ranks' libraries to listen on the interface of
    ``address``.

    They are for gloo, NCCL and tensorpipe if that is the loopback interface, else for gloo alone: NCCL may know a
    faster network, while gloo would listen at the address of the host name, which many distributions resolve to a
    loopback address. Variables that this process's environment has are left out; empty if no interface has that
    address.
    """
    interface = interface_of(address)
    if interface is None:
        return {}
    names = INTERFACE_VARIABLES if is_loopback(address) else INTERFACE_VARIABLES[:1]
    return {name: interface for name in names if name not in os.environ}
