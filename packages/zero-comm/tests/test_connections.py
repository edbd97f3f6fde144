"""Sockets that a rank cuts when it gives up."""

from __future__ import annotations

import socket

import pytest

from zero_comm.connections import Connections


def test_sockets_of_a_block_that_raises_are_cut_too() -> None:
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(ValueError, match="half open"), connections.recording():
            ours = socket.create_connection(server.getsockname()[:2])
            raise ValueError("half open")
        theirs, _ = server.accept()
    with ours, theirs:
        theirs.settimeout(5)
        assert connections.sever() == 1
        assert theirs.recv(1) == b""
