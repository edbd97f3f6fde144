"""Messages to the launcher over its sockets and by its ranks' files, as a target of fuzzing."""

from __future__ import annotations

import io
import json
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_mutations import JSON, json_bytes

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

TOKEN = "a token that nobody guesses"
NODE = ["00000", 11, 0]
STATE = {
    "round": 1,
    "complete": True,
    "closed": False,
    "deadline": 1.5e9,
    "participants": [[NODE, 0], [["00001", 12, 1], 1]],
    "waiting": [["00001", 13, 0]],
    "redundant": [],
    "heartbeats": [[NODE, 1.5e9], [["00001", 12, 1], 1.5e9]],
}
RECORD = {
    "entries": [[1, 1, 2, 3, "1", "gather", "w", "t.py:3"]],
    "started": 1,
    "finished": 0,
    "waiting": 1,
    "failed": 0,
}
FAILURE = {"rank": 0, "host": "a", "pid": 1, "exit_code": 1, "cause": "c", "detail": "d", "seconds": 1.0, "step": 3}
FACTS = {
    **dict.fromkeys(["hostname", "address", "python", "executable", "io_engine"], "x"),
    **dict.fromkeys(["cores", "memory", "memory_free", "disk_free", "open_files"], 5),
    **dict.fromkeys(["shared_memory_free", "memlock", "free_port"], None),
    "versions": {"torch": "2"},
    "devices": ["a"],
    "backends": ["gloo"],
}
RECORDS = {"0": RECORD, "1": RECORD}
ENDED = {"failed": True, "failures": [{**FAILURE, "at": 2.0}], "fates": ["x"], "notes": [], "records": RECORDS}
HEARD: dict[str, dict[str, Any]] = {
    "beat": {},
    "hello": {"hostname": "x", "versions": {}, "address": ""},
    "examination": {"facts": FACTS, "sees_mark": True},
    "environment": {"kept": {"A": "b"}},
    "ready": {"failures": [{**FAILURE, "at": 2.0}], "ended": [[1, 2.0]], "records": RECORDS},
    "store": {"port": 1234},
    "state": {"number": 1, "state": STATE, "version": 1},
    "served": {"round": 1, "port": 1234},
    "imported": {"imports": {"0": "[]"}},
    "started": {"pids": {"0": 11, "1": 12}},
    "lines": {"stream": "stdout", "text": "x\n"},
    "failed": {"attempt": 0, "divergence": None},
    "stalled": {"stalled": True, "records": RECORDS},
    "notice": {"text": "x"},
    "presence": {"attempt": 0, "arrived": [0], "ended": [1]},
    "done": {},
    "ended": {**ENDED, "left": "end", "why": "x"},
    "refused": {"why": "x"},
}
ELASTIC = {"place": "00000", "address": "127.0.0.1", "least": 1, "most": 2, "imports": {"0": "[]"}}
JOB = {
    "job_id": "j",
    "spec": {"target": "t.py", "args": [], "nproc": 1, "env": {}, "elastic": [1, 2]},
    "how": "script",
    "variables": {"A": "b"},
    "colours": [True, False],
    "host": "a",
    "generation": 0,
    "address": "127.0.0.1",
    "elastic": ELASTIC,
}
TOLD: dict[str, dict[str, Any]] = {
    "examine": {"mark": "/x"},
    "job": JOB,
    "serve": {"address": "127.0.0.1", "port": 0},
    "round": {"attempt": 0, "group_rank": 0, "groups": 2, "first": 0, "ranks": 2, "address": "127.0.0.1", "port": 1},
    "state": {"number": 1, "state": STATE, "version": 1, "replaced": True},
    "meet": {"round": 1, "attempt": 0, "first": 0, "ranks": 2, "address": "127.0.0.1", "port": 1},
    **{kind: {"attempt": 0} for kind in ("again", "grow")},
    **{kind: {} for kind in ("restart", "end", "finish", "dismiss", "stop")},
}
ANSWER = {"kind": "answer", "number": "1", "proof": "0", "about": "{}", "why": "x"}


class Messages:
    """A line, an answer of a stranger, a state of the rendezvous, a node's claim, and a conversation of two hosts."""

    form = JSON

    def __init__(self, folder: Path) -> None:
        self.orders = Orders(folder)
        self.here = versions()
        self.listener = Listener(queue.SimpleQueue(), address="127.0.0.1", token=TOKEN)
        for number in range(1, 4):
            self.listener.await_peer(Peer(str(number), ()))

    def seeds(self) -> list[bytes]:
        heard = [{"kind": kind, "at": 1.0, **fields} for kind, fields in HEARD.items()]
        told = [{"kind": kind, "at": 1.0, **fields} for kind, fields in TOLD.items()]
        talks = [[["a", message], ["b", message]] for message in heard]
        talks.append([[name, message] for message in heard for name in "ab"])
        values: list[Any] = [*heard, *told, *talks, STATE, {**STATE, "later": 1}, ANSWER, {"node_rank": 1, "nproc": 2}]
        return [*map(json_bytes, values), b"end", b"regroup", b"left"]

    def check(self, data: bytes) -> bool:
        """Take the bytes as all of that; each is refused by a ValueError or does what such a message may."""
        if len(data) < 64:
            self._check_order(data)
        self._check_stranger(data.split(b"\n")[:3])
        read = self._check_line(data)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return read
        if isinstance(value, dict):
            self._check_claim(value)
            self._check_state(value)
        elif isinstance(value, list):
            said = [item for item in value[:40] if isinstance(item, list) and len(item) == 2 and item[0] in ("a", "b")]
            for kind in (FixedCluster, ElasticCluster):
                self._check_talk(kind, said)
        return read

    def _check_order(self, said: bytes) -> None:
        (self.orders.folder / "left.0").write_bytes(said)
        answer = self.orders.answer(0)
        assert answer == (said.decode() if said in (REGROUP.encode(), END.encode()) else None)

    def _check_stranger(self, lines: list[bytes]) -> None:
        told = b"\n".join([*lines, b""])
        _require_refusal(lambda: welcome(io.BytesIO(told), io.BytesIO(), [TOKEN], lambda token, about: None))
        _require_refusal(lambda: present(io.BytesIO(told), io.BytesIO(), TOKEN, {"node_rank": 1}))
        for line in lines:
            _require_refusal(lambda line=line: Seal(b"key", launcher=True).open(line))  # type: ignore[misc]

    def _check_line(self, line: bytes) -> bool:
        read = False
        for kinds in (FROM_HOST, FROM_LAUNCHER):
            try:
                message = decode(line, kinds)
            except ValueError as error:
                assert len(str(error)) < 4000
                continue
            read = True
            json.dumps(message).encode()
            records = {rank: FlightRecord.from_json(found) for rank, found in message.get("records", {}).items()}
            difference({int(rank): record for rank, record in records.items()})
            explain({int(rank): record for rank, record in records.items()}, stalled=True)
        return read

    def _check_claim(self, about: dict[str, Any]) -> None:
        for peer in self.listener._open_peers.values():
            peer.claimed = peer.name == "3"
        peer, why = self.listener._peer_of_connection(TOKEN, about)
        assert (peer is None) == (why is not None) and len(why or "") < 300
        if peer is not None:
            assert peer.name != "3" and about["node_rank"] == int(peer.name)
            assert len(peer.slots) == about["nproc"] <= 4096

    def _check_state(self, state: dict[str, Any]) -> None:
        message = {"kind": "state", "at": 1.0, "number": 1, "version": 1, "state": state}
        try:
            decode(json_bytes(message), FROM_HOST)
        except ValueError:
            return
        again = to_plain(to_pickle(state))
        assert again.keys() <= state.keys() and places_in(again) == places_in(state)
        assert all(again[name] == state[name] for name in ("round", "complete", "closed"))

    def _check_talk(self, kind: type[Cluster], said: list[list[Any]]) -> None:
        job = LaunchSpec("true", program=True, quiet=True, max_restarts=1, elastic=(1, 2))
        cluster = kind(ClusterSpec(job, Hostfile({"a": (0,), "b": (0,)}), Transport("local")))
        hello = {"kind": "hello", "at": 1.0, "hostname": "", "versions": self.here, "address": ""}
        for name, message in [*((name, hello) for name in "ab"), *said]:
            try:
                heard = decode(json_bytes(message), FROM_HOST)
            except ValueError:
                heard = {"kind": "eof", "why": "nonsense"}
            if heard["kind"] != "beat":
                cluster.hear(name, heard)


def _require_refusal(call: Callable[[], object]) -> None:
    """Raise AssertionError unless a call is refused."""
    try:
        call()
    except (ValueError, Refused):
        return
    raise AssertionError("a stranger was let in")
