"""The store at which ranks meet that a launcher of others started, listening on one address."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from .discovery import RankEnvironment

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(minutes=30)  # torch's own for a store that `init_process_group` makes
_BACKLOG = 4096


def open_store(place: RankEnvironment, timeout: timedelta | None) -> TCPStore:
    """Open the ranks' store on rank 0, bound to the address that the other ranks use, and connect to it on the others.

    The address is 127.0.0.1 when all ranks are on this host, else ``place.address``. ``timeout``: of waits at the
    store, and of the connection; None is 30 minutes. Raises OSError, with what to do, when rank 0 cannot listen there.
    """
    address = LOOPBACK if place.local_world_size == place.world_size else place.address
    wait = timeout or STORE_TIMEOUT
    if place.rank != 0:
        return TCPStore(address, place.port, is_master=False, timeout=wait)
    server = _listen(address, place.port)
    # torch binds to every interface by itself; the socket that it is handed is its own from here on.
    return TCPStore(
        address,
        place.port,
        is_master=True,
        wait_for_workers=False,
        timeout=wait,
        master_listen_fd=server.detach(),
    )


def _listen(address: str, port: int) -> socket.socket:
    """Listen on ``address`` alone; OSError for one that is not this host's, or that no other host can reach."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if _is_loopback(str(target[0])) and address != "localhost" and not _is_loopback(address):
            raise OSError(f"{address} is {target[0]} on this host, where no other host can come")
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
            f"rank 0 cannot listen on {address} port {port} for the ranks' store: {error.strerror or error}; set "
            "MASTER_ADDR to the address of rank 0's host by which the others reach it, and MASTER_PORT to a free port"
        ) from error
    return server


def _is_loopback(address: str) -> bool:
    """Return whether ``address`` is a loopback IP address; False for host names."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
