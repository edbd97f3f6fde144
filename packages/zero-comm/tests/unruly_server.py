"""An inference server over HTTP, with one rank in this process, that does something else than answer one route."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from zero_comm import WeightReceiver

FAULTS = {
    "close": "RemoteDisconnected",
    "garbage": "BadStatusLine",
    "short": "answered 500",
    "error": "answered 503",
    "moved": "answered 302",
    "silence": " s",
    "drip": " s",
}
"""By the server's behaviour: a part of the client's error."""


class UnrulyServer:
    """Answers the four routes; ``fault`` happens at the call number ``nth`` of ``route``, after what the route does if
    ``late``. Attributes: ``loaded`` (weights by name), ``calls`` (routes), ``url``."""

    def __init__(self, route: str, fault: str, *, nth: int = 1, late: bool = False, timeout: float = 30.0) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.over = threading.Event()
        self._fault, self._at, self._late = fault, (route, nth), late
        self._receiver = WeightReceiver(self._load, timeout=timedelta(seconds=timeout))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def end(self) -> None:
        """End every answer under way, and the server."""
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._receiver.close()

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.loaded.update({name: value.clone() for name, value in weights})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                route = self.path.strip("/")
                server.calls.append(route)
                wrong = (route, server.calls.count(route)) == server._at
                if not wrong or server._late:
                    try:
                        getattr(server._receiver, route)(*content.values())
                    except Exception as error:
                        self.send_error(500, explain=f"{type(error).__name__}: {error}")
                        return
                if wrong:
                    server._misbehave(self.connection)
                    self.close_connection = True
                else:
                    self.send_response(200)
                    self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def _misbehave(self, connection: socket.socket) -> None:
        with suppress(OSError):  # the client has gone
            if self._fault == "garbage":
                connection.sendall(b"\x00\xff no HTTP at all\r\n\r\n")
            elif self._fault == "error":
                connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\nreloading")
            elif self._fault == "moved":
                connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")
            elif self._fault == "short":
                connection.sendall(b"HTTP/1.1 500 Error\r\nContent-Length: 4000\r\n\r\nhalf an answer")
            elif self._fault == "drip":
                while not self.over.wait(0.05):
                    connection.sendall(b"H")
            elif self._fault == "silence":
                self.over.wait()


@contextmanager
def unruly_server(route: str, fault: str, **options: Any) -> Iterator[UnrulyServer]:
    """A server that is ended after the block."""
    server = UnrulyServer(route, fault, **options)
    try:
        yield server
    finally:
        server.end()


def threads_are_over(name: str, seconds: float = 20.0) -> bool:
    """Return whether every thread whose name begins with ``name`` ends within ``seconds``."""
    end = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.name.startswith(name) for thread in threading.enumerate())
