"""Hosts that are lost between the call for the ranks' store and its answer: the others begin the next attempt."""

from __future__ import annotations

import pytest

from zero_launch.fixed_cluster import FixedCluster
from zero_launch.hostfile import Hostfile
from zero_launch.peers import Peer
from zero_launch.spec import ClusterSpec, LaunchSpec, Transport

REPORT = {"failures": [], "ended": [], "records": {}}


class Job:
    """A cluster of two hosts that are ready, of which the first was asked for the store; ``sent``: (host, kind)."""

    def __init__(self, min_hosts: int, monkeypatch: pytest.MonkeyPatch, max_restarts: int = 2) -> None:
        hosts = Hostfile({"a": (0,), "b": (0,)})
        job = LaunchSpec("train.py", max_restarts=max_restarts, quiet=True)
        self.cluster = FixedCluster(ClusterSpec(job, hosts, Transport("local"), min_hosts=min_hosts))
        self.sent: list[tuple[str, str]] = []
        self.hosts = list(self.cluster._roster.peers.values())
        monkeypatch.setattr(Peer, "send", lambda peer, kind, **_: self.sent.append((peer.name, kind)))
        for host in self.hosts:
            host.state, host.hello = "greeted", {"address": "127.0.0.1"}
        for host in self.hosts:
            self.cluster._on_ready(host, REPORT)
        assert self.sent == [("a", "serve")]
        self.sent.clear()


def test_another_host_opens_the_store_if_the_first_is_lost_before_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1, monkeypatch)
    a, b = job.hosts
    job.cluster._lose(a, "host a was lost")
    assert job.sent == [("b", "serve")]
    job.cluster._on_store(a, {"port": 5})  # what it had still sent
    job.cluster._on_store(b, {"port": 6})
    assert job.cluster._world_size == 1  # of the host that is left, whose records explain a deadlock
    job.cluster._on_done(b, {})
    assert job.sent == [("b", "serve"), ("b", "round"), ("b", "finish")]


def test_the_store_that_was_asked_for_serves_the_hosts_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1, monkeypatch)
    a, b = job.hosts
    job.cluster._lose(b, "host b was lost")
    job.cluster._on_store(a, {"port": 5})
    job.cluster._on_done(a, {})
    assert job.sent == [("a", "round"), ("a", "finish")]


def test_a_host_that_is_lost_before_the_first_round_costs_no_restart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(1, monkeypatch, max_restarts=0)
    a, b = job.hosts
    job.cluster._lose(a, "host a was lost")
    assert "host a was lost" in capsys.readouterr().err
    job.cluster._on_store(b, {"port": 6})
    job.cluster._on_done(b, {})
    assert job.sent == [("b", "serve"), ("b", "round"), ("b", "finish")]
    job.cluster._report_end()


def test_the_hosts_that_are_left_begin_without_one_that_is_lost_before_all_are_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(1, monkeypatch, max_restarts=0)
    a, b = job.hosts
    job.cluster._store_host, a.state, b.state = None, "greeted", "greeted"
    job.cluster._lose(a, "host a was lost")
    assert job.sent == [] and job.cluster._stopping is None
    job.cluster._on_ready(b, REPORT)
    assert job.sent == [("b", "serve")]


def test_a_host_that_is_lost_while_the_job_is_being_stopped_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1, monkeypatch, max_restarts=0)
    a, _ = job.hosts
    job.cluster._stop("asked to end")
    job.cluster._lose(a, "host a was lost")
    assert job.sent == [] and job.cluster._stopping == "asked to end"


def test_the_job_stops_if_too_few_hosts_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2, monkeypatch)
    a, _ = job.hosts
    job.cluster._lose(a, "host a was lost")
    assert job.cluster._stopping is not None and job.sent == []


def test_a_job_that_is_being_stopped_does_not_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1, monkeypatch)
    a, b = job.hosts
    job.cluster._on_store(a, {"port": 5})
    job.cluster._stop("asked to end")
    job.sent.clear()
    job.cluster._on_failed(b, {"attempt": 0, "divergence": None})
    assert ("a", "restart") not in job.sent and job.cluster._attempt == 0
