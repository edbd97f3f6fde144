"""Nonsense from outside: hostfiles, filters, messages and handshakes end in a value or a ValueError, not otherwise."""

from __future__ import annotations

import io
import json
import os
import queue
import resource
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zero_launch.cluster import Cluster
from zero_launch.desync import Record, difference, explain
from zero_launch.elastic_cluster import ElasticCluster
from zero_launch.facts import versions
from zero_launch.handshake import Refused, Seal, present, welcome
from zero_launch.hostfile import Hostfile
from zero_launch.meeting_state import places_in, to_pickle, to_plain
from zero_launch.messages import FROM_HOST, FROM_LAUNCHER, decode
from zero_launch.spec import ClusterSpec, LaunchSpec
from zero_launch.transport import Transport

HERE = versions()
CASES = int(os.environ.get("ZERO_FUZZ_CASES", "300"))
MOST_BYTES = 64 << 20
relaxed = settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))

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
    for kinds in (FROM_HOST, FROM_LAUNCHER):
        try:
            message = decode(line, kinds)
        except ValueError as error:
            assert len(str(error)) < 4000
            continue
        json.dumps(message).encode()
        for found in message.get("records", {}).values():
            Record.from_json(found)


@relaxed
@given(st.sampled_from([Cluster, ElasticCluster]), st.lists(st.tuples(st.sampled_from("ab"), messages(FROM_HOST))))
def test_whatever_hosts_say_the_launcher_goes_on_or_ends_the_job(kind, conversation):
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
    records = {rank: Record.from_json(data) for rank, data in found.items()}
    difference(records), explain(records, stalled=True)


@relaxed
@given(st.lists(st.binary(max_size=60) | json_values.map(lambda v: json.dumps(v).encode()), max_size=3))
def test_a_handshake_with_a_stranger_ends_in_a_refusal(lines):
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


@pytest.mark.soak
def test_a_million_cases_of_each(capsys):
    """The tests above, in a process of their own with a million cases each, within 2 GiB."""
    import subprocess
    import sys

    env = {**os.environ, "ZERO_FUZZ_CASES": os.environ.get("ZERO_FUZZ_SOAK_CASES", "1000000")}
    limit = 4 << 30
    command = [sys.executable, "-m", "pytest", "-q", "-o", "timeout=0", __file__, "-k", "not million"]
    done = subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    print(env["ZERO_FUZZ_CASES"], "cases each:", done.stdout[-300:])
    assert done.returncode == 0, done.stdout[-4000:]
