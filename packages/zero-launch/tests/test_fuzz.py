"""Nonsense from outside: hostfiles, filters, messages and handshakes end in a value or a ValueError, not otherwise."""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import random
import time
import tracemalloc
from pathlib import Path

import mutations
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zero_launch.cluster import Cluster
from zero_launch.desync import FlightRecord, difference, explain
from zero_launch.elastic_cluster import ElasticCluster
from zero_launch.facts import versions
from zero_launch.fixed_cluster import FixedCluster
from zero_launch.handshake import Refused, Seal, present, welcome
from zero_launch.hostfile import Hostfile
from zero_launch.meeting_state import places_in, to_pickle, to_plain
from zero_launch.messages import FROM_HOST, FROM_LAUNCHER, decode
from zero_launch.orders import END, REGROUP, Orders
from zero_launch.peers import Listener, Peer
from zero_launch.spec import ClusterSpec, LaunchSpec
from zero_launch.transport import Transport

HERE = versions()
CASES = int(os.environ.get("ZERO_FUZZ_CASES", "1000000"))
"""Of each soak here."""
MOST_BYTES = 64 << 20
relaxed = settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))

names = st.text(st.sampled_from("ab1-.:@%[]^,/$ \t\x00é#=\ud800"), max_size=12)
host_lines = st.one_of(
    st.text(max_size=60),
    st.builds(
        lambda name, n: f"{name} slots={n}",
        names,
        st.integers(-(10**12), 10**12) | st.text("0123456789٣x", max_size=12),
    ),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
small = st.integers(0, 5)
text = st.text(max_size=6)
entry = st.tuples(st.integers(1, 9), st.integers(1, 9), small, small, st.sampled_from("12"), text, text, text).map(list)
record = st.fixed_dictionaries(
    {"entries": st.lists(entry, max_size=5), "started": small, "finished": small, "waiting": st.integers(0, 9)}
)
failure = st.fixed_dictionaries(
    {
        "rank": small,
        "host": text,
        "pid": small,
        "exit_code": st.none() | st.integers(-99, 300),
        "cause": text,
        "detail": text,
        "seconds": st.floats(-9, 9),
        "step": st.none() | small,
        "at": st.floats(-9, 9),
    }
)
node = st.tuples(st.sampled_from(["00000", "00001", "x"]), small, small).map(list)
numbered = st.tuples(node, small).map(list)
meeting = st.fixed_dictionaries(
    {
        "round": small,
        "complete": st.booleans(),
        "closed": st.booleans(),
        "deadline": st.none() | st.floats(0, 1e12),
        "participants": st.lists(numbered, max_size=3),
        "waiting": st.lists(node, max_size=2),
        "redundant": st.lists(node, max_size=2),
        "heartbeats": st.lists(st.tuples(node, st.floats(0, 1e12)).map(list), max_size=3),
    }
)
FIELDS = {
    "hostname": text,
    "versions": st.dictionaries(text, text, max_size=2),
    "address": text,
    "kept": st.dictionaries(text, text, max_size=2),
    "failures": st.lists(failure, max_size=2),
    "port": st.integers(1, 65535),
    "pids": st.dictionaries(st.integers(0, 9).map(str), small, max_size=3),
    "imports": st.dictionaries(st.integers(0, 9).map(str), text, max_size=2),
    "stream": st.sampled_from(["stdout", "stderr"]),
    "text": text,
    "attempt": small,
    "divergence": st.none() | text,
    "stalled": st.booleans(),
    "records": st.dictionaries(st.integers(0, 9).map(str), record, max_size=3),
    "arrived": st.lists(small, max_size=3),
    "ended": st.lists(small, max_size=3),
    "failed": st.booleans(),
    "fates": st.lists(text, max_size=2),
    "notes": st.lists(text, max_size=2),
    "why": text,
    "number": small,
    "version": st.none() | small,
    "round": small,
    "state": st.none() | meeting,
}


@st.composite
def messages(draw, kinds) -> dict[str, object]:
    """A message of a known kind whose fields are mostly right."""
    kind = draw(st.sampled_from(sorted(kinds)))
    made = {"kind": kind, "at": draw(st.floats(0, 9) | json_values if draw(st.booleans()) else st.just(1.0))}
    for name in kinds[kind]:
        wrong = draw(st.integers(0, 9)) == 0
        made[name] = draw(json_values if wrong or name not in FIELDS else FIELDS[name])
    return made


@relaxed
@given(st.lists(host_lines, max_size=5).map("\n".join), st.text(st.sampled_from("ab1:,@-x"), max_size=12))
def test_a_hostfile_and_a_filter_are_read_or_refused(text, words):
    check_hostfile(text, words)


def check_hostfile(text: str, words: str) -> None:
    try:
        hostfile = Hostfile.parse(text)
    except ValueError as error:
        assert len(str(error)) < 4000
        return
    assert all(name[0] != "-" and " " not in name for name in hostfile.hosts)
    for choice in ({"include": words}, {"exclude": words}):
        try:
            assert 0 < hostfile.select(**choice).world_size <= hostfile.world_size
        except ValueError:
            continue


@relaxed
@given(
    st.binary(max_size=80)
    | json_values.map(lambda value: json.dumps(value).encode())
    | messages(FROM_HOST).map(lambda value: json.dumps(value).encode())
    | st.integers(1, 60000).map(lambda depth: b"[" * depth)
    | st.integers(1, 6000).map(lambda digits: b'{"kind":"ready","at":' + b"9" * digits + b"}")
)
def test_a_line_is_a_message_or_a_value_error(line):
    check_line(line)


def check_line(line: bytes) -> None:
    for kinds in (FROM_HOST, FROM_LAUNCHER):
        try:
            message = decode(line, kinds)
        except ValueError as error:
            assert len(str(error)) < 4000
            continue
        json.dumps(message).encode()
        for found in message.get("records", {}).values():
            FlightRecord.from_json(found)


@relaxed
@given(st.sampled_from([FixedCluster, ElasticCluster]), st.lists(st.tuples(st.sampled_from("ab"), messages(FROM_HOST))))
def test_whatever_hosts_say_the_launcher_goes_on_or_ends_the_job(kind, conversation):
    check_conversation(kind, conversation)


def check_conversation(kind: type[Cluster], conversation: list[tuple[str, dict[str, object]]]) -> None:
    job = LaunchSpec("true", program=True, quiet=True, max_restarts=1, elastic=(1, 2))
    cluster = kind(ClusterSpec(job, Hostfile({"a": (0,), "b": (0,)}), Transport("local")))
    greetings = [(name, {"kind": "hello", "at": 1.0, "hostname": "", "versions": HERE, "address": ""}) for name in "ab"]
    for name, message in [*greetings, *conversation]:
        try:
            heard = decode(json.dumps(message).encode(), FROM_HOST)
        except ValueError:
            heard = {"kind": "eof", "why": "nonsense"}
        if heard["kind"] != "beat":
            cluster.hear(name, heard)


@relaxed
@given(meeting)
def test_a_state_of_the_rendezvous_is_refused_or_comes_back_as_it_was(state):
    check_state(state)


def check_state(state: object) -> None:
    if state is None:  # a host that has none
        return
    try:
        decode(json.dumps({"kind": "state", "at": 1.0, "number": 1, "version": 1, "state": state}).encode(), FROM_HOST)
    except ValueError:
        return
    again = to_plain(to_pickle(state))
    assert again.keys() == state.keys()
    assert places_in(again) == places_in(state)
    for name in ("round", "complete", "closed"):
        assert again[name] == state[name]


@relaxed
@given(st.dictionaries(st.integers(0, 5), record, max_size=4))
def test_rings_that_make_no_sense_are_compared_all_the_same(found):
    check_rings(found)


def check_rings(found: dict[int, dict[str, object]]) -> None:
    records = {rank: FlightRecord.from_json(data) for rank, data in found.items()}
    difference(records), explain(records, stalled=True)


@relaxed
@given(st.lists(st.binary(max_size=60) | json_values.map(lambda v: json.dumps(v).encode()), max_size=3))
def test_a_handshake_with_a_stranger_ends_in_a_refusal(lines):
    check_handshake(lines)


def check_handshake(lines: list[bytes]) -> None:
    told = b"\n".join([*lines, b""])
    with pytest.raises((ValueError, Refused)):
        welcome(io.BytesIO(told), io.BytesIO(), ["the token of the job"], lambda token, about: None)
    with pytest.raises((ValueError, Refused)):
        present(io.BytesIO(told), io.BytesIO(), "the token of the job", {"node_rank": 1})
    for line in lines:
        with pytest.raises(ValueError):
            Seal(b"key", launcher=True).open(line)


def test_a_line_without_an_end_takes_no_memory_beyond_the_bound():
    class Endless(io.RawIOBase):
        given = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:
            self.given += len(buffer)
            assert self.given <= MOST_BYTES, "read on beyond the bound"
            buffer[:] = b"x" * len(buffer)
            return len(buffer)

    from zero_launch.channel import Channel

    tracemalloc.start()
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    Channel("a", io.BufferedReader(Endless()), io.BytesIO(), inbox, kinds=FROM_HOST)
    _, message = inbox.get(timeout=30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message["kind"] == "eof" and "no message" in message["why"]
    assert peak < MOST_BYTES


class Nodes:
    """A listener to which nodes come that know the token, and say nonsense of themselves."""

    def __init__(self) -> None:
        self.listener = Listener(queue.SimpleQueue(), address="127.0.0.1", token=TOKEN)
        for number in range(1, 4):
            self.listener.await_peer(Peer(str(number), ()))

    def check(self, about: object) -> None:
        taken = {peer.name for peer in self.listener._open_peers.values() if peer.claimed}
        known = about if isinstance(about, dict) else {}
        peer, why = self.listener._who(TOKEN, known)
        assert (peer is None) == (why is not None) and len(why or "") < 300
        if peer is not None:
            assert peer.name not in taken and known["node_rank"] == int(peer.name)
            assert len(peer.slots) == known["nproc"] <= 4096
            peer.claimed = random.random() < 0.5


TOKEN = "a token that nobody guesses"


class Words:
    """The folder of orders, in which ranks leave whatever they like."""

    def __init__(self, folder: Path) -> None:
        self.orders = Orders(folder)

    def check(self, said: bytes) -> None:
        (self.orders.folder / "left.0").write_bytes(said)
        answer = self.orders.answer(0)
        assert answer == (said.decode() if said in (REGROUP.encode(), END.encode()) else None)


def cases(kind: str, folder: Path):
    """A function that draws one case and checks it."""
    if kind == "hostfile":
        return lambda rng: check_hostfile(mutations.hostfile(rng), mutations.words(rng))
    if kind == "lines":
        both = (mutations.FROM_HOST, mutations.FROM_LAUNCHER)
        return lambda rng: check_line(mutations.line(mutations.message(rng.choice(both), rng), rng))
    if kind == "conversation":
        return lambda rng: check_conversation(
            rng.choice([FixedCluster, ElasticCluster]),
            [(rng.choice("ab"), mutations.message(mutations.FROM_HOST, rng)) for _ in range(rng.randrange(8))],
        )
    if kind == "meeting":
        return lambda rng: check_state(mutations.mutate(mutations.STATE, rng))
    if kind == "handshake":
        answer = {"kind": "answer", "number": "1", "proof": "0", "about": "{}", "why": "x"}
        return lambda rng: check_handshake(
            [mutations.line(mutations.mutate(answer, rng), rng).replace(b"\n", b" ") for _ in range(rng.randrange(3))]
        )
    if kind == "node":
        nodes = Nodes()
        return lambda rng: nodes.check(mutations.mutate({"node_rank": rng.randrange(5), "nproc": 2}, rng))
    orders = Words(folder)
    said = [b"end", b"regroup", b"", b"end\n", b"\xff", b"regroup" * 9, b"en", b"left"]
    return lambda rng: orders.check(rng.choice([rng.choice(said), rng.randbytes(3)]))


KINDS = ("hostfile", "lines", "conversation", "meeting", "handshake", "node", "orders")


def memory(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(field + ":")[2].split()[0]) << 10


@pytest.fixture
def one_look(monkeypatch) -> None:
    """What is installed is looked up once; that takes longer than all else."""
    monkeypatch.setattr("zero_launch.roster.versions", lambda: dict(HERE))


def run(kind: str, count: int, rng: random.Random, folder: Path) -> str:
    """So many cases; what processor time the slowest took and how far the memory grew."""
    one = cases(kind, folder)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for _ in range(min(count, 200)):
            one(rng)
        Path("/proc/self/clear_refs").write_text("5")
        held, slowest = memory("VmRSS"), 0.0
        for _ in range(count):
            begin = time.process_time()
            one(rng)
            slowest = max(slowest, time.process_time() - begin)
    grown = memory("VmHWM") - held
    assert grown < MOST_BYTES and slowest < 10
    return f"{count} cases of {kind}: 0 crashes, {grown >> 20} MiB at most, slowest {slowest:.3f} s"


@pytest.mark.usefixtures("one_look")
@pytest.mark.parametrize("kind", KINDS)
def test_changed_copies_are_read_or_refused(kind, tmp_path):
    run(kind, 500, random.Random(5), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@pytest.mark.usefixtures("one_look")
@pytest.mark.parametrize("kind", KINDS)
def test_a_million_changed_copies_are_read_or_refused(kind, tmp_path):
    print(run(kind, CASES, random.Random(), tmp_path))
