"""The calls by which a trainer drives an inference server, and how long it waits for each."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Protocol

from .errors import PeerError

_ADVICE = "See whether the server runs and what its log says, then send again"


class WeightServer(Protocol):
    """The calls by which a trainer drives a server; vLLM's ``VLLMWeightSyncClient`` has the same. Each returns when
    every rank of the server is done."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> object:
        """Have every rank of the server join the process group that ``init_info`` describes (see
        `WeightReceiver.init_weight_transfer_engine`)."""

    def start_weight_update(self) -> object:
        """Have every rank of the server prepare for new weights."""

    def update_weights(self, update_info: dict[str, Any], /) -> object:
        """Have every rank of the server receive and load the weights that ``update_info`` names
        (`describe_weights`)."""

    def finish_weight_update(self) -> object:
        """Tell every rank of the server that all weights have been sent."""


class WeightServerClient:
    """Drives a server over HTTP, by the routes of a vLLM server.

    ``url``: its address, as "http://127.0.0.1:8000". ``timeout``: seconds that one call may take: finding the host's
    address, connecting, TLS and the answer together. No proxy is used, and no redirection followed. Raises ValueError
    for another kind of address. Calls raise `PeerError`, which names the server and the call, when the server refuses
    one, cannot be reached, gives no answer in time, or gives one that is not HTTP.
    """

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        address = urllib.parse.urlsplit(url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if address.scheme not in kinds or not address.hostname:
            raise ValueError(f"expected the address of a server, as 'http://127.0.0.1:8000', got {url!r}")
        self._connection = kinds[address.scheme]
        self._host, self._port = address.hostname, address.port
        self._path = address.path.rstrip("/")
        self._url = url.rstrip("/")
        self._timeout = timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> None:
        """Have every rank of the server join the process group that ``init_info`` describes (see
        `WeightReceiver.init_weight_transfer_engine`)."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Prepare the server for new weights."""
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any], /) -> None:
        """Have the server receive and load the weights that ``update_info`` names (`describe_weights`)."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        """Tell the server that all weights have been sent."""
        self._post("finish_weight_update", {})

    def _post(self, route: str, content: dict[str, Any]) -> None:
        """Post ``content`` as JSON to the server's ``route``, and wait for the answer, whose content is dropped. Raises
        `PeerError` as the class says."""
        connection = self._connection(self._host, self._port, timeout=self._timeout)
        cut = _Cut(self._timeout)
        try:
            connection.sock = self._connect(connection.port, cut)
            body = json.dumps(content).encode()
            connection.request("POST", f"{self._path}/{route}", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            status = answer.status
            told = answer.read(2000).decode(errors="replace") if status >= 300 else ""
        except (OSError, http.client.HTTPException) as error:
            what = f"{type(error).__name__}: {error}"
            if cut.is_due or isinstance(error, TimeoutError):
                what = f"{cut.awaited} was not there in {self._timeout:g} s"
            raise PeerError(f"the server at {self._url} did not answer {route}: {what}. {_ADVICE}.") from error
        finally:
            cut.cancel()
            connection.close()
        if status >= 300:
            raise PeerError(f"the server at {self._url} answered {status} to {route}: {told}. {_ADVICE}.")

    def _connect(self, port: int, cut: _Cut) -> socket.socket:
        """Return a socket connected to the server's ``port``, with TLS for https; ``cut`` ends connecting and the
        connection in time, and is told what is waited for. Raises OSError, and what looking up the host's address
        raises."""
        cut.awaited = f"the address of host '{self._host}'"
        lookup = ServerCall("look-up", socket.getaddrinfo, self._host, port, 0, socket.SOCK_STREAM, timeout=cut.left())
        if not lookup.is_done(cut.left()):  # nothing ends a lookup that is under way
            raise TimeoutError
        cut.awaited = "a connection"
        plain = _first_that_connects(lookup.result(), cut)
        cut.awaited = "its answer"
        if self._connection is http.client.HTTPConnection:
            return plain
        cut.awaited = "the TLS handshake"
        try:
            secure = ssl.create_default_context().wrap_socket(plain, server_hostname=self._host)
        except BaseException:
            plain.close()
            raise
        cut.awaited = "its answer"
        return secure


def _first_that_connects(addresses: Iterable[Any], cut: _Cut) -> socket.socket:
    """Return a socket to the first of ``addresses`` (entries of `socket.getaddrinfo`) that takes a connection. ``cut``
    limits the time, and cuts the connection when that is over. Raises the OSError of the last address if none
    connects."""
    failure = OSError("the host has no address")
    left = list(addresses)
    while left:
        family, kind, protocol, _, address = left.pop(0)
        try:
            connection = socket.socket(family, kind, protocol)
        except OSError as error:  # a family that this kernel lacks
            failure = error
            continue
        try:
            connection.settimeout(cut.left() / (1 + len(left)))  # the others get their share where this one is silent
            connection.connect(address)
            connection.settimeout(cut.left())
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            cut.watch(connection)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


class _Cut:
    """Cuts a connection once ``seconds`` have passed since this was made: a socket's own timeout begins again with each
    byte.

    Attributes:
        awaited: what the client waits for, in words, for errors; the client sets it.
        is_due: whether the time is over.
    """

    def __init__(self, seconds: float) -> None:
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + seconds
        self._connection: socket.socket | None = None
        self.awaited = "its answer"
        self.is_due = False
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def left(self) -> float:
        """Return the seconds until the connection is cut. Raises TimeoutError if the time is over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def watch(self, connection: socket.socket) -> None:
        """Have ``connection`` cut when the time is over, at once if it is already; also if the caller wraps it for TLS
        later."""
        with self._lock:
            self._connection = connection.dup()
        if self.is_due:
            self._cut()

    def cancel(self) -> None:
        """Drop the connection: from now on nothing is cut."""
        self._timer.cancel()
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _cut(self) -> None:
        """Mark the time as over, and shut down the watched connection, if there is one; called by the timer."""
        with self._lock:
            self.is_due = True
            if self._connection is not None:
                with suppress(OSError):  # it is closed already
                    self._connection.shutdown(socket.SHUT_RDWR)


class ServerCall:
    """One call of a server, on a thread of its own, so that it is waited for no longer than ``timeout`` seconds from
    its start.

    ``name``: of the call, for messages. ``call``: called with ``arguments`` when this object is made. ``failed``:
    called on that thread if ``call`` raises. A call that never returns keeps its thread, which does not keep the
    process from ending.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., object],
        *arguments: Any,
        timeout: float,
        failed: Callable[[], object] | None = None,
    ) -> None:
        self._name = name
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._answer: Future[object] = Future()
        self._failed = failed
        threading.Thread(target=self._run, args=(call, arguments), name=f"zero_comm: {self._name}", daemon=True).start()

    def is_done(self, seconds: float) -> bool:
        """Return whether the call has returned or raised; wait ``seconds`` for it at most."""
        return bool(wait([self._answer], seconds).done)

    def result(self) -> Any:
        """Wait until the call has returned; return its answer. Raises what the call raised, and `PeerError` when its
        ``timeout`` is over."""
        if not self.is_done(max(0.0, self._deadline - time.monotonic())):
            raise PeerError(f"the server did not answer {self._name} in {self._timeout:g} s. {_ADVICE}.")
        return self._answer.result()

    def _run(self, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """Call ``call(*arguments)``, and keep its answer or exception for `result`; the thread's function."""
        try:
            self._answer.set_result(call(*arguments))
        except BaseException as error:
            self._answer.set_exception(error)
            if self._failed is not None:
                self._failed()
