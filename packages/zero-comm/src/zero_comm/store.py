"""The store at which ranks meet that another launcher than zero-launch started.

A store is torch's key-value server, through which process groups are made; one process keeps it and listens for the
others.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from .arriving import await_ranks, await_store
from .discovery import RankEnvironment

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(minutes=30)  # torch's own for a store that `init_process_group` makes
_BACKLOG = 4096
_AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set to `True` by torchrun where its agent keeps the ranks' store."""


def open_store(place: RankEnvironment, timeout: timedelta | None) -> TCPStore:
    """Open the ranks' store and return it once all ranks have come; see `await_ranks` for what is logged meanwhile.

    ``place``: the rank environment of this process. ``timeout``: of waits at the store, and of the connection; None is
    30 minutes. Raises OSError, with what to do, when rank 0 cannot listen, and PeerError when the others do not come in
    time.

    Rank 0 keeps the store, unless torchrun's agent does. Where all ranks are on this host it listens at 127.0.0.1
    alone, else at ``place.address`` alone. With torchrun's own variables and a ``place.address`` that other hosts can
    reach it listens on every address, as torch's store does, since rank 0 may have another name for itself than the
    others have.
    """
    wait = timeout or STORE_TIMEOUT
    own_variables = place.source == "torchrun" and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    all_here = place.local_world_size == place.world_size and not own_variables
    address = LOOPBACK if all_here else place.address
    kept_by_agent = own_variables and os.environ.get(_AGENT_VARIABLE) == "True"
    if place.rank != 0 or kept_by_agent:
        await_store(address, place, wait)
        store = TCPStore(address, place.port, is_master=False, wait_for_workers=False, timeout=wait)
    else:
        # torch binds to every interface by itself; the socket that it is handed is its own from here on.
        server = _own_server(address, place.port) if own_variables else listen(address, place.port).detach()
        store = TCPStore(
            address,
            place.port,
            is_master=True,
            wait_for_workers=False,
            timeout=wait,
            master_listen_fd=server,
            multi_tenant=own_variables,
        )
    await_ranks(store, address, place, wait)
    return store


def _own_server(address: str, port: int) -> int | None:
    """Return the file descriptor of a socket that listens on ``address`` and ``port``, if ``address`` is one of the
    loopback interface; else None, and torch opens the socket.

    None too where ``port`` is taken: torch shares it with a store of this process, or raises. Raises OSError as
    `listen` does.
    """
    if address != "localhost" and not _is_loopback(address):
        return None
    try:
        return listen(address, port).detach()
    except OSError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            return None
        raise


def listen(address: str, port: int) -> socket.socket:
    """Listen on ``address`` alone, at ``port`` (0: a free one), and return the socket. Raises OSError, with what to do,
    for an address that is not this host's or that no other host can reach, and for a port that is taken."""
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
