"""A sender of weights beside servers that fail: each failure is named, and waited for no longer than the timeout."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from unruly_server import FAULTS, UnrulyServer, threads_are_over, unruly_server

from zero_comm import PeerError, WeightBucket, WeightInfo, WeightSender, WeightServerClient, bucket_offsets

ROUTES = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
INFO = (WeightInfo("weight", torch.float32, (40,)),)
SECONDS = 1.0


class Buckets:
    """Three buckets of one weight; ``thrown`` and ``met`` are what an engine's iterator would tell other ranks."""

    def __init__(self) -> None:
        self.thrown: list[BaseException] = []
        self.met = 0

    def pass_(self, size: int = 40) -> Iterator[WeightBucket]:
        infos = (WeightInfo("weight", torch.float32, (size,)),)
        for number in range(3):
            memory = torch.full((size,), float(number)).view(torch.uint8)
            assert memory.numel() == bucket_offsets(infos)[1]
            try:
                yield WeightBucket(number, 3, infos, memory)
            except BaseException as failure:
                self.thrown.append(failure)
                raise
            self.met += 1


def bounded(call: Callable[[], object], seconds: float = 30.0) -> None:
    """Call, on a thread, and raise what it raises; TimeoutError if it is not over in ``seconds``."""
    pool = ThreadPoolExecutor(1)
    try:
        pool.submit(call).result(seconds)
    finally:
        pool.shutdown(wait=False)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("route", ROUTES)
def test_a_failing_call_names_server_call_and_what_to_do_and_the_iterator_hears_of_it(route: str, fault: str) -> None:
    buckets = Buckets()
    with unruly_server(route, fault) as server:
        client = WeightServerClient(server.url, timeout=SECONDS if FAULTS[fault] == " s" else 60)
        sender = WeightSender(client, ranks=1, timeout=timedelta(seconds=60))
        with pytest.raises(PeerError) as raised:
            bounded(lambda: sender.send(buckets.pass_()))
        said = str(raised.value)
        assert server.url in said and route in said and FAULTS[fault] in said and "then send again" in said
        assert buckets.thrown == [raised.value]
        assert buckets.met == (2 if route == "finish_weight_update" else 0)
    assert threads_are_over("zero_comm: ")


@pytest.mark.parametrize("nth", (2, 3))
@pytest.mark.parametrize("late", (False, True))
def test_a_failure_at_a_later_bucket_is_told_too(nth: int, late: bool) -> None:
    buckets = Buckets()
    with unruly_server("update_weights", "error", nth=nth, late=late) as server:
        sender = WeightSender(WeightServerClient(server.url), ranks=1)
        with pytest.raises(PeerError, match="answered 503 to update_weights: reloading"):
            bounded(lambda: sender.send(buckets.pass_()))
        assert len(buckets.thrown) == 1 and buckets.met == nth - 1
        sender.send(buckets.pass_())  # connects again
        sender.close()
        assert torch.equal(server.loaded["weight"], torch.full((40,), 2.0)) and buckets.met == nth - 1 + 3


class Silent:
    """A server of the caller's own whose ``route`` never returns until `over` is set."""

    def __init__(self, route: str) -> None:
        self.over = threading.Event()
        self._route = route
        self._server = UnrulyServer("", "")
        self._client = WeightServerClient(self._server.url)

    def __getattr__(self, route: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if route == self._route:
                self.over.wait()
            else:
                getattr(self._client, route)(*arguments)

        return call

    def end(self) -> None:
        self.over.set()
        self._server.end()


@pytest.mark.parametrize("size", (40, 1 << 20))
@pytest.mark.parametrize("route", ROUTES)
def test_the_senders_timeout_holds_for_calls_that_never_return(route: str, size: int) -> None:
    buckets, server = Buckets(), Silent(route)
    try:
        sender = WeightSender(server, ranks=1, timeout=timedelta(seconds=SECONDS))
        words = "have not come in 1 s" if route == ROUTES[0] else f"did not answer {route} in 1 s"
        with pytest.raises(PeerError, match=words):
            bounded(lambda: sender.send(buckets.pass_(size)))
        assert len(buckets.thrown) == 1
    finally:
        server.end()
    assert threads_are_over("zero_comm: ")


def test_what_fails_here_comes_before_what_the_server_makes_of_it() -> None:
    with unruly_server("", "") as server:
        sender = WeightSender(WeightServerClient(server.url), ranks=1)

        def failing() -> Iterator[WeightBucket]:
            """The second bucket has less memory than it says."""
            yield WeightBucket(0, 2, INFO, torch.zeros(160, dtype=torch.uint8))
            yield WeightBucket(1, 2, INFO, torch.zeros(160, dtype=torch.uint8, device="meta"))

        with pytest.raises(Exception, match="(?i)meta"):
            bounded(lambda: sender.send(failing()))
    assert threads_are_over("zero_comm: ")


def said_within_bound(client: WeightServerClient) -> str:
    """What a call says that cannot reach its server; TimeoutError if it is not over long after the client's timeout."""
    with pytest.raises(PeerError) as raised:
        bounded(client.start_weight_update)
    return str(raised.value)


def test_a_look_up_that_does_not_return_is_waited_for_no_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver_answers = threading.Event()

    def slow(*_: Any) -> list[Any]:
        resolver_answers.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        said = said_within_bound(WeightServerClient("http://server.invalid:1", timeout=SECONDS))
    finally:
        resolver_answers.set()
    assert "the address of host 'server.invalid' was not there in 1 s" in said and "start_weight_update" in said
    assert threads_are_over("zero_comm: ")


def test_all_addresses_of_a_host_share_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first, socket.socket() as second:
        for waiting in (first, second):  # they fill the queue, so further ones get no answer
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        silent = (socket.AF_INET, socket.SOCK_STREAM, 0, "", full.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [silent] * 100)
        said = said_within_bound(WeightServerClient("http://many.invalid:1", timeout=SECONDS))
    assert "a connection was not there in 1 s" in said


def test_a_tls_handshake_that_goes_on_byte_by_byte_is_cut() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):  # the client has gone
                connection.sendall(b"\x16\x03\x03\x40\x00")  # a handshake record of 16 KiB begins
                while not over.wait(0.05):
                    connection.sendall(b"\x02")

        threading.Thread(target=drip, daemon=True).start()
        try:
            said = said_within_bound(
                WeightServerClient(f"https://127.0.0.1:{server.getsockname()[1]}", timeout=SECONDS)
            )
        finally:
            over.set()
    assert "the TLS handshake was not there in 1 s" in said


@pytest.mark.parametrize("url", ("127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://127.0.0.1:port"))
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ValueError):
        WeightServerClient(url)
