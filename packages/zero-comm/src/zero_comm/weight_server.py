"""The calls by which a trainer drives an inference server, and how long it waits for each."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Protocol

from .errors import PeerError

_ADVICE = "See whether the server runs and what its log says, then send again"


class WeightServer(Protocol):
    """The calls by which a trainer drives a server; vLLM's ``VLLMWeightSyncClient`` has the same. Each returns when
    every rank of the server is done."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> object:
        """Have every rank of the server join the process group that ``init_info`` describes."""

    def start_weight_update(self) -> object:
        """Prepare for new weights."""

    def update_weights(self, update_info: dict[str, Any], /) -> object:
        """Receive and load the weights that ``update_info`` names."""

    def finish_weight_update(self) -> object:
        """End the update: all weights are there."""


class WeightServerClient:
    """Drives a server over HTTP, by the routes of a vLLM server.

    ``url``: its address, as "http://127.0.0.1:8000". ``timeout``: seconds that one call may take, connection and answer
    together. No proxy is used, and no redirection followed. Raises ValueError for another kind of address. Calls raise
    `PeerError`, which names the server and the call, when the server refuses one, cannot be reached, gives no answer in
    time, or gives one that is not HTTP.
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
        """Have every rank of the server join the process group that ``init_info`` describes."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Prepare the server for new weights."""
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any], /) -> None:
        """Have the server receive and load the weights that ``update_info`` names."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        """End the update."""
        self._post("finish_weight_update", {})

    def _post(self, route: str, content: dict[str, Any]) -> None:
        """Post ``content`` as JSON to ``route`` and wait for the answer."""
        connection = self._connection(self._host, self._port, timeout=self._timeout)
        cut = _Cut(self._timeout)
        try:
            connection.connect()
            cut.watch(connection.sock)
            body = json.dumps(content).encode()
            connection.request("POST", f"{self._path}/{route}", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            status = answer.status
            told = answer.read(2000).decode(errors="replace") if status >= 300 else ""
        except (OSError, http.client.HTTPException) as error:
            what = f"{type(error).__name__}: {error}"
            if cut.is_due or isinstance(error, TimeoutError):
                what = f"its answer was not there in {self._timeout:g} s"
            raise PeerError(f"the server at {self._url} did not answer {route}: {what}. {_ADVICE}.") from error
        finally:
            cut.cancel()
            connection.close()
        if status >= 300:
            raise PeerError(f"the server at {self._url} answered {status} to {route}: {told}. {_ADVICE}.")


class _Cut:
    """Cuts a connection once ``seconds`` have passed since this was made: a socket's own timeout begins again with each
    byte."""

    def __init__(self, seconds: float) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.is_due = False
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def watch(self, connection: socket.socket) -> None:
        """Cut ``connection``, at once if it is time already."""
        with self._lock:
            self._connection = connection
        if self.is_due:
            self._cut()

    def cancel(self) -> None:
        """Cut nothing."""
        self._timer.cancel()

    def _cut(self) -> None:
        """Cut the connection, if there is one."""
        with self._lock:
            self.is_due = True
            if self._connection is not None:
                with suppress(OSError):  # it is closed already
                    self._connection.shutdown(socket.SHUT_RDWR)


class ServerCall:
    """One call of a server, on a thread of its own, so that it is waited for no longer than ``timeout`` seconds.

    ``name``: of the call, for messages. ``call``: called with ``arguments``. ``failed``: called on that thread if
    it raises. A call that never returns keeps its thread, which does not keep the process.
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

    def result(self) -> None:
        """Wait until the call has returned. Raises what it raised, and `PeerError` when its time is over."""
        if not self.is_done(max(0.0, self._deadline - time.monotonic())):
            raise PeerError(f"the server did not answer {self._name} in {self._timeout:g} s. {_ADVICE}.")
        self._answer.result()

    def _run(self, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """Make the call."""
        try:
            self._answer.set_result(call(*arguments))
        except BaseException as error:
            self._answer.set_exception(error)
            if self._failed is not None:
                self._failed()
