"""The channel to a host: a line that never ends is a lost peer, and takes no memory beyond the bound."""

from __future__ import annotations

import io
import os
import queue
import threading
import tracemalloc

import pytest

from zero_launch.channel import Channel
from zero_launch.messages import FROM_HOST, encode

MOST_BYTES = 64 << 20


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

    tracemalloc.start()
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    Channel("a", io.BufferedReader(Endless()), io.BytesIO(), inbox, kinds=FROM_HOST).start()
    _, message = inbox.get(timeout=30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message["kind"] == "eof" and "no message" in message["why"]
    assert peak < MOST_BYTES


def test_what_was_sent_before_the_channel_starts_is_heard_only_then() -> None:
    """The inbox's reader replies through the channel, so the channel has to be stored before a message arrives."""
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    sent = io.BytesIO(encode({"kind": "word", "at": 0.0}) + b"\n")
    channel = Channel("a", sent, io.BytesIO(), inbox, kinds={"word": {}})
    with pytest.raises(queue.Empty):
        inbox.get(timeout=1.0)
    channel.start()
    assert inbox.get(timeout=30) == ("a", {"kind": "word"})


def test_there_is_room_on_a_closed_channel_for_what_is_lost() -> None:
    reading, peer = os.pipe()  # the other end stays open, and says nothing
    sent = io.BytesIO()
    with open(reading, "rb") as reader, open(peer, "wb"):
        channel = Channel("a", reader, sent, queue.SimpleQueue(), kinds=FROM_HOST).start()
        channel.close(seconds=30)
        assert sent.closed and not channel.broken
        for _ in range(2000):
            channel.send("lines", stream="stdout", text="late")
        waiting = threading.Thread(target=channel.wait_for_room, daemon=True)
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()
