"""The hosts of a job as the launcher sees them: the connection to each, and its last known state."""

from __future__ import annotations

import collections
import contextlib
import queue
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO

from zero_launch.channel import Channel
from zero_launch.desync import FlightRecord
from zero_launch.handshake import Refused, welcome
from zero_launch.messages import FROM_HOST, Message
from zero_launch.sockets import listen
from zero_launch.transport import Transport

Inbox = queue.SimpleQueue[tuple[str, Message]]
_MODULE = "zero_launch.host"
_IGNORE_SIGNALS = 'trap "" TERM USR1; exec "$@"'
_ERROR_LINES = 20
_WELCOME_SECONDS = 10
_MOST_STRANGERS = 64
_MOST_REFUSALS = 10
_MOST_RANKS = 4096


@dataclass
class Peer:
    """One host, and what the launcher knows of it.

    ``state`` goes from `called` over `greeted`, `ready`, `running` to `done`, `ended` or `lost`. ``slots``: the indices
    of its slots, one rank each. ``channel``: None until it connects. ``process``: the start command (ssh, pdsh); None
    for a host that connects by itself. ``errors``: the last lines of that command's standard error. ``failures``,
    ``fates``, ``notes`` and ``records`` are as the host's messages `ready`, `stalled` and `ended` reported them;
    ``folder``: of its logs, empty if they are not kept.
    """

    name: str
    slots: tuple[int, ...]
    channel: Channel | None = None
    process: subprocess.Popen[bytes] | None = None
    errors: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=_ERROR_LINES))
    state: str = "called"
    claimed: bool = False
    """True once a node that came by itself has taken this place."""
    hello: Message = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    """Rank to pid, for the attempt that runs."""
    failures: list[Message] = field(default_factory=list)
    ended: list[tuple[int, float]] = field(default_factory=list)
    """The ranks of the attempt that is over which ended with status 0 by themselves, with when, by the host's clock."""
    fates: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: dict[int, FlightRecord] = field(default_factory=dict)
    divergence: str | None = None
    stalled: bool = False
    folder: str = ""
    generation: int = 0
    """Number of hosts of this name that were lost before."""
    asked_to_stop: bool = False
    """True once the launcher has asked it to end what it runs."""

    @property
    def key(self) -> str:
        """The key of this host in the roster, which differs from the keys of lost hosts of the same name."""
        return self.name if not self.generation else f"{self.name} #{self.generation}"

    @property
    def present(self) -> bool:
        """Return whether the host has neither ended nor been lost."""
        return self.state not in ("ended", "lost")

    @property
    def clock_offset(self) -> float:
        """Seconds that this clock is ahead of the host's."""
        return 0.0 if self.channel is None else self.channel.clock_offset

    def take_report(self, message: Message) -> None:
        """Store how the host's ranks ended in the last attempt, as its message `ready` says, in ``failures`` (added to
        those stored before), ``ended`` and ``records``."""
        self.failures += message["failures"]
        self.ended = [(rank, at) for rank, at in message["ended"]]
        self.records = {int(rank): FlightRecord.from_json(data) for rank, data in message["records"].items()}

    def forget_attempt(self) -> None:
        """Clear what is stored about the last attempt before another begins: ``failures``, ``ended``, ``records``,
        ``stalled`` and ``divergence``."""
        self.failures, self.ended, self.records, self.stalled, self.divergence = [], [], {}, False, None

    def send(self, kind: str, **content: Any) -> None:
        """Queue a message of ``kind`` with the fields of ``content`` (messages.py) for the host; do nothing for a host
        that has ended, is lost, or never connected.

        The messages `stop` and `dismiss` set ``asked_to_stop`` in any case.
        """
        self.asked_to_stop = self.asked_to_stop or kind in ("stop", "dismiss")
        if self.channel is not None and self.present:
            self.channel.send(kind, **content)

    def stderr_tail(self) -> str:
        """Return the last lines of standard error of the start command (ssh, pdsh), for a report."""
        return "\n".join(self.errors)

    def exit_status(self) -> int | None:
        """Return the exit status of the start command (ssh, pdsh), negative for a signal that ended it; wait up to 1 s
        for it. None if it still runs then, or for a host that connects by itself."""
        if self.process is None:
            return None
        try:
            return self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None

    def kill_start_command(self) -> None:
        """Kill the start command of a lost host, without waiting for it."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        """Close the channel, and end the start command: by SIGKILL if it has not ended within 1 s."""
        if self.channel is not None:
            self.channel.close()
        if self.process is None:
            return
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def call(
    peer: Peer, transport: Transport, inbox: Inbox, listener: Listener | None, *, ignores_signals: bool = False
) -> None:
    """Start the launcher's agent on the host ``peer`` by a command of ``transport``: set ``peer.process`` and, unless
    there is a listener, ``peer.channel``.

    The agent's hello, and `eof` when the command or the connection ends, arrive in ``inbox``. ``listener``: accepts the
    agent's connection where ``transport`` carries no input; None elsewhere. ``ignores_signals``: the command ignores
    SIGTERM and SIGUSR1.
    """
    arguments: list[str] = []
    if listener is not None:
        arguments = [str(listener.port), listener.expect(peer)]
    piped = listener is None
    command = transport.command(peer.name, _MODULE, *arguments)
    peer.process = subprocess.Popen(
        ["/bin/sh", "-c", _IGNORE_SIGNALS, "zero-launch-call", *command] if ignores_signals else command,
        stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=transport.environment(),
        start_new_session=True,  # Ctrl-C in the terminal is for us; the hosts hear of it in order
    )
    threads = [threading.Thread(target=_keep_errors, args=(peer, peer.process.stderr), daemon=True)]
    if peer.process.stdin is not None and peer.process.stdout is not None:
        reader, writer = _binary(peer.process.stdout), _binary(peer.process.stdin)
        peer.channel = Channel(peer.key, reader, writer, inbox, kinds=FROM_HOST)
        peer.channel.start()
    else:
        threads.append(threading.Thread(target=_keep_errors, args=(peer, peer.process.stdout), daemon=True))
        threads.append(threading.Thread(target=_report_command_exit, args=(peer, inbox), daemon=True))
    for thread in threads:
        thread.start()


def _binary(stream: IO[bytes]) -> BinaryIO:
    """Return ``stream`` itself, with the type that `Channel` asks for."""
    return stream  # type: ignore[return-value]


def _keep_errors(peer: Peer, stream: IO[bytes] | None) -> None:
    """Append the lines of ``stream`` to ``peer.errors`` until it ends; a thread's function."""
    for line in stream or ():
        peer.errors.append(line.decode(errors="replace").rstrip("\n"))


def _report_command_exit(peer: Peer, inbox: Inbox) -> None:
    """Wait until the command that started the host (pdsh) exits, and put ``eof`` into ``inbox``; a thread's function.

    For hosts that connect back; over the command's own pipes the channel sees the end of file.
    """
    if peer.process is not None:
        peer.process.wait()
        inbox.put((peer.key, {"kind": "eof", "why": "the program that called it has ended"}))


def _shut_down(connection: socket.socket) -> None:
    """Shut the connection down, so that a thread that reads from it stops waiting; do nothing if it has ended."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


class Listener:
    """Accepts connections from hosts that know a token (see handshake.py), in a thread of its own.

    A host that the launcher starts gets its own token, valid for one connection. Nodes that connect by themselves share
    ``token`` and send their node number; each number is accepted once. An accepted host's `Peer` gets its channel,
    whose messages go into ``inbox``. ``nodes``: those that may connect from the start. ``address``: where to listen;
    empty for every interface of this host. ``port``: 0 for a free one. The attributes ``address`` and ``port`` hold the
    real ones. Raises OSError as `sockets.listen` does.
    """

    def __init__(
        self, inbox: Inbox, *, address: str = "", port: int = 0, token: str | None = None, nodes: Iterable[Peer] = ()
    ) -> None:
        self._inbox = inbox
        self._expected: dict[str, Peer] = {}
        self._open_peers = {peer.name: peer for peer in nodes}  # before anybody can connect
        self._token = token
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        self._refusals = 0
        self._server = listen(address or "0.0.0.0", port, "the hosts of the job")
        self.port: int = self._server.getsockname()[1]
        self.address = str(self._server.getsockname()[0])
        threading.Thread(target=self._accept, name="zero-launch-accept", daemon=True).start()

    def expect(self, peer: Peer) -> str:
        """Make a new token with which the host ``peer`` may connect, once, and return it."""
        token = secrets.token_hex(32)
        with self._lock:
            self._expected[token] = peer
        return token

    def await_peer(self, peer: Peer) -> None:
        """From now on, accept as ``peer`` the node that knows the shared token and has the number ``peer.name``."""
        with self._lock:
            self._open_peers[peer.name] = peer

    def close(self) -> None:
        """Stop accepting connections; those that were accepted stay open, and their channels go on."""
        self._server.close()

    def _accept(self) -> None:
        """Accept connections until `close`, each served by `_welcome` in a new thread; close any beyond 64 that have
        not shown a token yet. The thread's function."""
        while True:
            try:
                connection, address = self._server.accept()
            except OSError:
                return  # closed
            if not self._strangers.acquire(blocking=False):
                connection.close()  # too many who have not said who they are; ours try again
                continue
            threading.Thread(target=self._welcome, args=(connection, str(address[0])), daemon=True).start()

    def _welcome(self, connection: socket.socket, address: str) -> None:
        """Do the handshake on a new ``connection`` from ``address`` within 10 s, and give the host's `Peer` a started
        channel; close the connection if that fails.

        If a host was admitted and then broke off, a message `eof` goes into the inbox; a refusal is printed.
        """
        admitted: list[Peer] = []
        # A stranger who sends a byte now and then must not keep one of the few places for strangers.
        limit = threading.Timer(_WELCOME_SECONDS, _shut_down, (connection,))
        limit.daemon = True
        limit.start()
        try:
            connection.settimeout(_WELCOME_SECONDS)
            reader, writer = connection.makefile("rb"), connection.makefile("wb")
            with self._lock:
                tokens = [*self._expected, *([] if self._token is None else [self._token])]

            def admit(token: str, about: Mapping[str, Any]) -> str | None:
                """Return why the connection with this token is refused, or None after adding its peer to
                ``admitted``."""
                peer, why = self._peer_of_connection(token, about)
                admitted.extend([] if peer is None else [peer])
                return why

            seal = welcome(reader, writer, tokens, admit)
        except Refused as error:
            self._say_refused(address, str(error))
            connection.close()
            return
        except (OSError, ValueError) as error:
            if admitted:  # it was one of ours, and broke off before it began
                self._inbox.put((admitted[0].key, {"kind": "eof", "why": f"the connection broke: {error}"}))
            connection.close()  # else not one of ours
            return
        finally:
            limit.cancel()
            self._strangers.release()
        connection.settimeout(None)
        peer = admitted[0]
        peer.channel = Channel(peer.key, reader, writer, self._inbox, kinds=FROM_HOST, seal=seal)
        peer.channel.start()

    def _say_refused(self, address: str, why: str) -> None:
        """Print why a connection from ``address`` was refused; only the first ten refusals are printed."""
        with self._lock:
            self._refusals += 1
            if self._refusals > _MOST_REFUSALS:
                return
        print(f"zero-launch: refused a connection from {address}: {why}", file=sys.stderr, flush=True)

    def _peer_of_connection(self, token: str, about: Mapping[str, Any]) -> tuple[Peer | None, str | None]:
        """Return (the `Peer` that may connect, None), or (None, why the connection is refused). ``token``: the one that
        the other end has shown. ``about``: what it says of itself, `node_rank` and `nproc` of a node that comes by
        itself.

        The peer counts as connected from now on: the next connection for it is refused.
        """
        with self._lock:
            if token != self._token:
                peer = self._expected.pop(token, None)
                return peer, None if peer is not None else "another has come with the same token"
            rank, nproc = about.get("node_rank"), about.get("nproc")
            if type(rank) is not int or type(nproc) is not int or not 1 <= nproc <= _MOST_RANKS:
                return None, f"it is to say its node_rank and nproc, and said {rank!r:.20} and {nproc!r:.20}"
            if str(rank) not in self._open_peers:
                return None, f"--node_rank {rank!r:.20}: expected 1 to {len(self._open_peers)}"
            peer = self._open_peers[str(rank)]
            if peer.claimed:
                return None, f"--node_rank {rank} is taken: another node has come with it"
            peer.claimed = True
            peer.slots = tuple(range(nproc))
            return peer, None


def title(peer: Peer) -> str:
    """Return the host's name as messages use it: `host NAME`."""
    return f"host {peer.name}"
