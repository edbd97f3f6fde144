from __future__ import annotations

import os
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from zero_launch import meeting
from zero_launch.channel import Channel
from zero_launch.meeting_state import on_another_clock
from zero_launch.messages import FROM_HOST, FROM_LAUNCHER

NODE = ["00000", 7, 0]


def test_times_move_to_another_clock_and_what_stands_for_lost_or_over_stays() -> None:
    state = {"round": 2, "deadline": 50.0, "heartbeats": [[NODE, 40.0], [["00001", 9, 0], 0.0]]}
    moved = on_another_clock(state, -7200.0)
    assert moved == {"round": 2, "deadline": -7150.0, "heartbeats": [[NODE, -7160.0], [["00001", 9, 0], 0.0]]}
    assert on_another_clock(moved, 7200.0) == state
    assert on_another_clock({**state, "deadline": 0.0}, 5.0) == {
        **state,
        "deadline": 0.0,
        "heartbeats": [[NODE, 45.0], [["00001", 9, 0], 0.0]],
    }
    assert on_another_clock(None, 5.0) is None


def test_a_host_waits_for_a_launcher_that_lives_and_not_for_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 1.2)
    pipes = [os.pipe(), os.pipe()]
    inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    ends = [os.fdopen(pipes[0][0], "rb"), os.fdopen(pipes[1][1], "wb")]
    host = Channel("launcher", *ends, inboxes[0], kinds=FROM_LAUNCHER).start()  # type: ignore[arg-type]
    ends = [os.fdopen(pipes[1][0], "rb"), os.fdopen(pipes[0][1], "wb")]
    launcher = Channel("host", *ends, inboxes[1], kinds=FROM_HOST).start()  # type: ignore[arg-type]
    backend = meeting.ChannelBackend(host)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(backend.get_state)
        assert inboxes[1].get(timeout=5)[1]["kind"] == "state"
        time.sleep(2.5)  # its output stands still, say: it only says that it is there
        assert not asked.done()
        launcher.send("state", number=1, state=None, version=0, replaced=False)
        backend.answers.put(inboxes[0].get(timeout=5)[1])
        assert asked.result(timeout=5) is None
        again = pool.submit(backend.get_state)
        launcher.close()
        with pytest.raises(RendezvousConnectionError, match="the launcher does not answer"):
            again.result(timeout=10)
    host.close()
