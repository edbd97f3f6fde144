"""Hosts of elastic jobs that end by themselves or cannot take part: the job continues, and says the host's own
reason."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from conftest import Lines, marked_processes, wait_until

from zero_launch import elastic_cluster
from zero_launch.channel import Channel
from zero_launch.elastic_cluster import ElasticCluster
from zero_launch.facts import versions
from zero_launch.hostfile import Hostfile
from zero_launch.messages import FROM_LAUNCHER
from zero_launch.report import LaunchError
from zero_launch.roster import Roster
from zero_launch.spec import ClusterSpec, LaunchSpec
from zero_launch.transport import Transport

FAILURE = {
    "rank": 1,
    "host": "b",
    "pid": 12,
    "exit_code": 1,
    "cause": "ValueError: of the user",
    "detail": "",
    "seconds": 1.0,
    "step": None,
    "at": 2.0,
}
ENDED = {"kind": "ended", "failed": True, "failures": [], "fates": [], "notes": [], "records": {}}


@pytest.fixture
def cluster() -> ElasticCluster:
    """A launcher that leads a round of two hosts with one rank each."""
    job = LaunchSpec("true", program=True, quiet=True, max_restarts=1, elastic=(1, 2))
    cluster = ElasticCluster(ClusterSpec(job, Hostfile({"a": (0,), "b": (0,)}), Transport("local")))
    for number, (name, peer) in enumerate(cluster._roster.peers.items()):
        cluster.hear(name, {"kind": "hello", "hostname": "", "versions": versions(), "address": ""})
        cluster.hear(name, {"kind": "ready", "failures": [], "ended": [], "records": {}})
        cluster.hear(name, {"kind": "started", "pids": {str(number): 11 + number}})
        peer.state = "running"
    cluster._leading, cluster._rounds, cluster._ranks = True, 1, 2
    return cluster


def test_a_host_that_ends_by_itself_is_lost_and_the_others_go_on(cluster):
    cluster.hear("b", {**ENDED, "failures": [FAILURE], "why": "nothing was heard from the launcher for 10.2 s"})
    cluster.hear("a", {**ENDED, "fates": ["rank 0 was stopped by zero-launch (SIGTERM)"], "why": "it got SIGTERM"})
    assert (cluster._stopping, cluster._restarting, cluster._over) == (None, True, False)
    assert sorted(cluster._calls) == ["a", "b"]  # both are called again
    causes = {failure.rank: failure.cause for failure in cluster._failures()}
    assert causes == {0: "host a was lost: it got SIGTERM", 1: "ValueError: of the user"}


def test_a_host_that_ends_because_it_was_asked_to_or_for_what_its_ranks_did_ends_the_job(cluster):
    cluster.hear("b", {**ENDED, "divergence": "the ranks asked for different collectives"})
    assert cluster._stopping == "host b failed"
    cluster._roster.peers["a"].send("stop")
    cluster.hear("a", ENDED)
    assert not cluster._roster.present and not cluster._calls and not cluster._lost


def test_a_host_that_ends_by_itself_when_no_restart_is_left_ends_the_job_with_its_reason(cluster):
    cluster._restarts = 1
    cluster.hear("b", {**ENDED, "why": "it got SIGTERM"})
    with pytest.raises(LaunchError, match="rank 1 of 2 failed first: host b was lost: it got SIGTERM"):
        cluster._report_end()


def test_a_host_that_cannot_run_the_job_says_why_in_the_error(cluster):
    cluster._rounds = 0
    cluster.hear("a", {"kind": "refused", "why": "FileNotFoundError: no script train.py"})
    with pytest.raises(LaunchError, match=r"(?s)host a cannot run the job\n.*host a: FileNotFoundError: no script"):
        cluster._report_end()


RECORD = {
    "entries": [[1, 1, 2, 3, "1", "gather", "w", "t.py:3"]],
    "started": 1,
    "finished": 0,
    "waiting": 1,
    "failed": 0,
}
NO_RECORD = {
    "entries": [[1, 0, 2, 3, "1", "gather", "v", "t.py:2"]],
    "started": 1,
    "finished": 1,
    "waiting": 0,
    "failed": 0,
}


@pytest.mark.parametrize(("at", "hopeless"), [(1.0, True), (3.0, False)], ids=["before it failed", "after"])
def test_a_job_ends_when_a_rank_of_one_host_waited_for_one_of_another_that_had_ended_well(cluster, at, hopeless):
    cluster._restarting, cluster._began_at = True, 0.0
    waited = {"failures": [FAILURE], "ended": [], "records": {"1": RECORD}}
    cluster.hear("b", {"kind": "ready", **waited})
    cluster.hear("a", {"kind": "ready", "failures": [], "ended": [[0, at]], "records": {"0": NO_RECORD}})
    assert cluster._is_hopeless(1) == hopeless
    why = "rank 0 ended with exit status 0 while others wait for it:\n  rank 1 waits in gather of 'w' in step 2"
    assert (cluster._stopping or "").startswith(why) == hopeless


@pytest.mark.parametrize(("nproc", "state"), [(2, "lost"), (1, "greeted")])
def test_a_host_that_comes_back_with_more_ranks_than_the_job_may_have_is_refused(cluster, capfd, nproc, state):
    cluster._spec.job.__dict__["quiet"] = False
    cluster._roster.peers["b"].state = "called"
    cluster._roster.peers["b"].slots = tuple(range(nproc))
    cluster.hear("b", {"kind": "hello", "hostname": "", "versions": versions(), "address": ""})
    assert cluster._roster.peers["b"].state == state
    said = "host b: with its 2 ranks the job could have 3, and may have 2"
    assert (said in capfd.readouterr().err) == (state == "lost")


def test_nodes_that_come_with_other_numbers_of_ranks_count_before_the_first_round(cluster):
    cluster._leading, cluster._rounds = False, 0
    cluster._roster.peers["b"].state = "called"
    cluster._roster.peers["b"].slots = (0, 1)
    cluster.hear("b", {"kind": "hello", "hostname": "", "versions": versions(), "address": ""})
    assert (cluster._least, cluster._most) == (1, 1)


def test_why_a_host_does_not_come_back_is_said_once_until_it_changes(cluster, capfd):
    cluster._spec.job.__dict__["quiet"] = False
    for why in ("no route", "no route", "refused", "no route"):
        cluster._roster.peers["b"].state = "called"
        cluster.hear("b", {"kind": "eof", "why": why})
    told = [line.rpartition(": ")[2] for line in capfd.readouterr().err.splitlines()]
    assert told == ["no route", "refused", "no route"]


def test_a_launcher_that_was_held_up_reads_what_hosts_said_before_it_judges_them(cluster):
    reader, writer = (os.fdopen(number, mode) for number, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    # it hears itself, as a host hears it
    channel = Channel("a", reader, writer, cluster._inbox, kinds=FROM_LAUNCHER).start()
    channel.heard_at -= 30.0
    cluster._roster.peers["a"].channel = channel
    cluster._roster._looked_at = time.monotonic() - 5.0
    cluster._lose_silent_hosts()
    assert cluster._roster.peers["a"].present
    for _ in range(3):
        time.sleep(0.2)
        cluster._lose_silent_hosts()
    channel.heard_at -= 30.0
    cluster._lose_silent_hosts()
    assert not cluster._roster.peers["a"].present
    channel.close()


LOOP = """
    import os, time
    attempt, rank, size = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    open(f"round{attempt}.{rank}.{size}", "w").close()
    while not os.path.exists("enough"):
        time.sleep(0.1)
"""
WORDS = ("--hostfile", "hosts", "--launcher", "local", "--elastic", "1:2", "--restarts", 3, "--no_standby")


def test_a_node_that_waits_for_a_round_when_the_job_ends_well_ends_well_too(start, write_script, tmp_path, monkeypatch):
    script = write_script(LOOP)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["--no_ssh", "--nnodes", 2, "--master_addr", "127.0.0.1", "--master_port", port, "--nproc", 1]
    words += ["--elastic", "1:2", "--restarts", 1, "--no_standby"]
    monkeypatch.setenv("ZERO_LAUNCH_TOKEN", "a token of the test's own")
    first, second = (start(*words, "--node_rank", number, script) for number in range(2))
    told, gone = Lines(first.stderr), Lines(second.stderr)
    assert wait_until(lambda: len(list(tmp_path.glob("round0.*.2"))) == 2, 120), f"{told.text}\n{gone.text}"
    second.kill()
    assert wait_until((tmp_path / "round1.0.1").exists, 60), told.text
    again = start(*words, "--node_rank", 1, script)
    heard = Lines(again.stderr)
    assert told.have("host 1 is back", 90), f"{told.text}\nand the host that came back:\n{heard.text}"
    (tmp_path / "enough").touch()
    assert [first.wait(60), again.wait(60)] == [0, 0], heard.text
    assert not list(tmp_path.glob("round2.*"))


LOSES_ONE = """
    import sys
    from zero_launch.elastic_cluster import ElasticCluster
    from zero_launch.hostfile import Hostfile
    from zero_launch.spec import ClusterSpec, LaunchSpec, Transport

    class LosesOne(ElasticCluster):
        '''A cluster that loses a host when the other has opened the store of the round that both agreed on.'''

        def _on_served(self, peer, message):
            (other,) = [host for host in self._roster.peers.values() if host.name != peer.name]
            if other.generation == 0:
                other.process.kill()
                self._lose(other, f"host {other.name} was lost")
            super()._on_served(peer, message)

    job = LaunchSpec(sys.argv[1], elastic=(2, 2), max_restarts=1, standby=False)
    LosesOne(ClusterSpec(job, Hostfile({"a": (0,), "b": (0,)}), Transport("local"))).run()
"""


def test_a_round_of_which_too_few_ranks_are_left_does_not_begin(write_script, tmp_path):
    script = write_script(LOOP).rename(tmp_path / "loop.py")
    (tmp_path / "enough").touch()
    job = subprocess.run(
        [sys.executable, write_script(LOSES_ONE), script], cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert job.returncode == 0, job.stderr
    assert "was lost" in job.stderr and "is back" not in job.stderr  # no round had begun
    assert sorted(path.name for path in tmp_path.glob("round*")) == ["round0.0.2", "round0.1.2"]


def test_a_host_that_is_back_before_the_round_of_its_predecessor_begins_waits_for_the_next(cluster, monkeypatch):
    monkeypatch.setattr(Roster, "_call_or_await", lambda *_: None)
    a, b = cluster._roster.peers.values()
    a.state = b.state = "ready"
    nodes = [["00000", 11, 0], ["00001", 12, 0]]
    state = {"round": 1, "complete": True, "closed": False, "deadline": None, "waiting": [], "redundant": []}
    state |= {"participants": [[node, rank] for rank, node in enumerate(nodes)]}
    cluster._meeting.replace({**state, "heartbeats": [[node, time.time()] for node in nodes]}, None)
    cluster._lose(b, "host b was lost")
    back = cluster._roster.renew(b)
    cluster.hear(back.key, {"kind": "hello", "hostname": "", "versions": versions(), "address": ""})
    cluster.hear(back.key, {"kind": "ready", "failures": [], "ended": [], "records": {}})
    cluster.hear("a", {"kind": "served", "round": 1, "port": 5})
    assert (a.state, back.state, cluster._ranks) == ("running", "ready", 1)


@pytest.mark.soak
@pytest.mark.parametrize("who", ["launcher", "host"])
def test_a_job_goes_on_after_its_launcher_was_stopped_or_a_host_was_asked_to_end(
    start, write_script, mark, tmp_path, who
):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    job = start(*WORDS, "--silence", 2, write_script(LOOP))
    told = Lines(job.stderr)
    assert wait_until(lambda: len(list(tmp_path.glob("round0.?.2"))) == 2, 60), told.text
    if who == "launcher":
        job.send_signal(signal.SIGSTOP)
        time.sleep(5)
        job.send_signal(signal.SIGCONT)
    else:
        hands = [p for p in psutil.Process(job.pid).children() if "zero_launch.host" in p.cmdline()]
        hands[0].terminate()
    size = 2 if who == "launcher" else 1  # ranks that never save do not leave for a host that is back
    assert wait_until(lambda: len(list(tmp_path.glob(f"round1.?.{size}"))) == size, 60), told.text
    (tmp_path / "enough").touch()
    assert job.wait(timeout=60) == 0, told.text
    reason = r"nothing was heard from the launcher for \d" if who == "launcher" else "it got SIGTERM"
    assert told.have(f"host [ab] was lost: {reason}", 5), told.text
    assert "restart 1 of 3" in told.text and "restart 2 of 3" not in told.text
    assert wait_until(lambda: not marked_processes(mark), 10)


@pytest.mark.parametrize("comes", [True, False])
def test_a_round_after_all_hosts_were_lost_waits_for_those_that_are_back_a_little_later(cluster, monkeypatch, comes):
    monkeypatch.setattr(elastic_cluster, "_LAST_CALL_SECONDS", 30.0 if comes else 0.0)
    monkeypatch.setattr(Roster, "_call_or_await", lambda *_: None)
    for name in ("a", "b"):
        cluster.hear(name, {**ENDED, "failures": [FAILURE], "why": "nothing was heard from the launcher for 10.2 s"})

    def come(name):
        lost = next(peer for peer in cluster._roster.peers.values() if peer.name == name)
        key = cluster._roster.renew(lost).key
        cluster.hear(key, {"kind": "hello", "hostname": "", "versions": versions(), "address": ""})
        cluster.hear(key, {"kind": "ready", "failures": [], "ended": [], "records": {}})

    def meet(*places):
        nodes = [[place, 1, number] for number, place in enumerate(places)]
        state = {"round": 1, "complete": False, "closed": False, "deadline": time.time() + 99, "waiting": []}
        state |= {"participants": [[node, 0] for node in nodes], "heartbeats": [[node, time.time()] for node in nodes]}
        cluster._meeting.replace({**state, "redundant": []}, cluster._meeting.newest()["version"])
        cluster._update_expected_hosts()
        return cluster._meeting.newest()["state"]["deadline"] == 0.0  # the round begins

    cluster._meeting.replace({"heartbeats": [], "participants": [], "deadline": None, "complete": False}, None)
    come("a")
    time.sleep(0.01)
    assert meet("00000") is not comes
    if comes:
        come("b")
        assert meet("00000", "00001")
