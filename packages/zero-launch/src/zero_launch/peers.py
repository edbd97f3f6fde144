"""The hosts of a job as the launcher sees them: how each is reached, and what it last said."""

from __future__ import annotations

import collections
import hmac
import json
import os
import queue
import secrets
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO

from zero_launch.channel import Channel, Message
from zero_launch.desync import Record
from zero_launch.transport import Transport

Inbox = queue.SimpleQueue[tuple[str, Message]]
_MODULE = "zero_launch.host"
_ERROR_LINES = 20


@dataclass
class Peer:
    """One host. ``state`` goes from `called` over `greeted`, `ready`, `running` to `done`, `ended` or `lost`."""

    name: str
    slots: tuple[int, ...]
    channel: Channel | None = None
    process: subprocess.Popen[bytes] | None = None
    errors: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=_ERROR_LINES))
    state: str = "called"
    hello: Message = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    """Rank to pid, for the attempt that runs."""
    failures: list[Message] = field(default_factory=list)
    fates: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: dict[int, Record] = field(default_factory=dict)
    divergence: str | None = None
    stalled: bool = False
    folder: str = ""

    @property
    def there(self) -> bool:
        """Whether it takes part in the job still."""
        return self.state not in ("ended", "lost")

    def send(self, kind: str, **content: Any) -> None:
        """Send a message, if there is anybody to send it to."""
        if self.channel is not None and self.there:
            self.channel.send(kind, **content)

    def last_words(self) -> str:
        """What its program wrote to standard error, for a report."""
        return "\n".join(self.errors)

    def close(self) -> None:
        """Let go of it: the channel, and the program that carried it."""
        if self.channel is not None:
            self.channel.close()
        if self.process is None:
            return
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def call(peer: Peer, transport: Transport, inbox: Inbox, listener: Listener | None) -> None:
    """Start the launcher's hand on the host; it says hello through ``inbox`` when it is there."""
    arguments: list[str] = []
    if listener is not None:
        arguments = [str(listener.port), listener.expect(peer)]
    piped = listener is None
    peer.process = subprocess.Popen(
        transport.command(peer.name, _MODULE, *arguments),
        stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=transport.environment(),
        start_new_session=True,  # Ctrl-C in the terminal is for us; the hosts hear of it in order
    )
    threads = [threading.Thread(target=_keep_errors, args=(peer, peer.process.stderr), daemon=True)]
    if peer.process.stdin is not None and peer.process.stdout is not None:
        peer.channel = Channel(peer.name, _binary(peer.process.stdout), _binary(peer.process.stdin), inbox)
    else:
        threads.append(threading.Thread(target=_keep_errors, args=(peer, peer.process.stdout), daemon=True))
        threads.append(threading.Thread(target=_report_end, args=(peer, inbox), daemon=True))
    for thread in threads:
        thread.start()


def _binary(stream: IO[bytes]) -> BinaryIO:
    return stream  # type: ignore[return-value]


def _keep_errors(peer: Peer, stream: IO[bytes] | None) -> None:
    for line in stream or ():
        peer.errors.append(line.decode(errors="replace").rstrip("\n"))


def _report_end(peer: Peer, inbox: Inbox) -> None:
    """For a host with a connection of its own: the end of the program that called it is an end too."""
    if peer.process is not None:
        peer.process.wait()
        inbox.put((peer.name, {"kind": "eof", "why": "the program that called it has ended"}))


class Listener:
    """Takes connections from hosts that call back: with a token each, or from anyone who knows the port."""

    def __init__(self, inbox: Inbox, *, port: int = 0) -> None:
        self._inbox = inbox
        self._expected: dict[str, Peer] = {}
        self._open_peers: list[Peer] = []
        try:
            self._server = socket.create_server(("", port))
        except OSError as error:
            raise OSError(
                f"cannot listen on port {port}: {os.strerror(error.errno or 0)}; choose another with --master_port"
            ) from None
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="zero-launch-accept", daemon=True).start()

    def expect(self, peer: Peer) -> str:
        """Make a token with which ``peer`` may connect, once."""
        token = secrets.token_hex(16)
        self._expected[token] = peer
        return token

    def await_peer(self, peer: Peer) -> None:
        """Let ``peer`` be whoever connects and says that it is node number ``peer.name``."""
        self._open_peers.append(peer)

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        connection.settimeout(10)
        reader = connection.makefile("rb")
        try:
            hello = json.loads(reader.readline(1 << 16))
            peer = self._who(hello)
        except (OSError, ValueError, AttributeError):
            peer = None  # not one of ours
        if peer is None:
            connection.close()
            return
        connection.settimeout(None)
        writer = connection.makefile("wb")
        peer.channel = Channel(peer.name, reader, writer, self._inbox)
        peer.channel.clock_offset = time.time() - hello.pop("at")
        self._inbox.put((peer.name, hello))

    def _who(self, hello: Message) -> Peer | None:
        token = str(hello.get("token", ""))
        for expected in list(self._expected):
            if hmac.compare_digest(expected, token):
                return self._expected.pop(expected)
        for peer in self._open_peers:
            if str(hello.get("node_rank")) == peer.name and peer.channel is None:
                peer.slots = tuple(range(int(hello["nproc"])))
                return peer
        return None
