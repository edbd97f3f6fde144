"""Messages between the launcher and the process that it has on each host: one line of JSON each, over a pair of pipes.

Both ends send something at least twice a second. An end that receives nothing for the job's `silence_seconds` takes the
other for lost; so a dead link differs from a quiet job. A line that is no valid message ends the connection.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from zero_launch.handshake import Seal
from zero_launch.messages import MAX_MESSAGE_BYTES, Check, Message, decode, encode

BEAT_SECONDS = 0.5
_BACKLOG = 1000
_PART_CHARACTERS = 1 << 20


class Channel:
    """Sends and receives messages from `start` on, in threads of its own, so that neither a full pipe nor a dead peer
    blocks the caller.

    ``name``: of the other end, in ``inbox``. ``reader``, ``writer``: the connection. ``kinds``: the messages that the
    other end may send. ``seal``: signs and checks lines where strangers may reach the connection; else None. Received
    messages go to ``inbox`` as ``(name, message)``, without `beat` and without the field `at`; the end of the stream as
    a message of kind `eof` with the reason, `why`. ``broken``: True once nothing more can be sent or received.
    """

    def __init__(
        self,
        name: str,
        reader: BinaryIO,
        writer: BinaryIO,
        inbox: queue.SimpleQueue[tuple[str, Message]],
        *,
        kinds: Mapping[str, Mapping[str, Check]],
        seal: Seal | None = None,
    ) -> None:
        self.name = name
        self.heard_at = time.monotonic()
        """When the last message came."""
        self.clock_offset = float("inf")
        """Seconds that this clock is ahead of the other end's, at most; each message makes it more exact."""
        self.broken = False
        self._reader, self._writer, self._inbox = reader, writer, inbox
        self._kinds, self._seal = kinds, seal
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._write)]

    def start(self) -> Channel:
        """Start the threads and return this object. Call it once, after the channel is stored where the inbox's reader
        looks for it: the first message may arrive at once."""
        for thread in self._threads:
            thread.start()
        return self

    def send(self, kind: str, **content: Any) -> None:
        """Queue a message of ``kind`` with the fields of ``content`` (see messages.py), from any thread; never blocks.

        A message to a broken or closed connection is lost.
        """
        self._outbox.put({"kind": kind, **content})

    def wait_for_room(self) -> None:
        """Block while more than 1000 messages wait to be sent; return at once when nothing more is sent: after `close`,
        and when the connection is broken."""
        while self._outbox.qsize() > _BACKLOG and not self.broken and self._threads[1].is_alive():
            time.sleep(0.01)

    @property
    def silence(self) -> float:
        """Seconds since the last message arrived."""
        return time.monotonic() - self.heard_at

    def close(self, seconds: float = 1.0) -> None:
        """Send the queued messages, waiting up to ``seconds``, and close the writing end; the other end may still send,
        and what it sends still reaches the inbox.
        """
        self._outbox.put(None)
        self._threads[1].join(seconds)

    def _write(self) -> None:
        """Send the queued messages, and a `beat` after each half second without one, until `close` or an error; then
        close the writing end. The function of the writing thread."""
        try:
            while True:
                try:
                    message = self._outbox.get(timeout=BEAT_SECONDS)
                except queue.Empty:
                    message = {"kind": "beat"}
                if message is None:
                    break
                line = encode({**message, "at": time.time()})
                self._writer.write((line if self._seal is None else self._seal.sign(line)) + b"\n")
                self._writer.flush()
        except (OSError, ValueError):
            self.broken = True  # the reader sees the end of the stream, and that is reported
        try:
            self._writer.close()
        except OSError:
            self.broken = True

    def _read(self) -> None:
        """Put the messages that arrive into the inbox until the stream ends or a line is no valid message, then a
        message `eof`. The function of the reading thread."""
        why = "the connection was closed"
        try:
            while line := self._reader.readline(MAX_MESSAGE_BYTES + 1):
                content = line.rstrip(b"\n")
                message = decode(content if self._seal is None else self._seal.open(content), self._kinds)
                self.heard_at = time.monotonic()
                self.clock_offset = min(self.clock_offset, time.time() - message.pop("at"))
                if message["kind"] != "beat":
                    self._inbox.put((self.name, message))
        except OSError as error:
            why = f"the connection broke: {error}"
        except ValueError as error:
            why = f"it sent what is no message: {error}"
        self.broken = True
        self._inbox.put((self.name, {"kind": "eof", "why": why}))


class ChannelSink:
    """A `Sink` that sends lines of ``stream`` (`stdout` or `stderr`) to the launcher, no faster than it reads them.
    ``channel``: the started one to the launcher; what is written after it is closed is lost.
    """

    def __init__(self, channel: Channel, stream: str) -> None:
        self._channel = channel
        self._stream = stream

    def write(self, text: str) -> None:
        """Send ``text``, in parts if it is long; blocks while the launcher is behind with reading."""
        for begin in range(0, len(text), _PART_CHARACTERS):
            self._channel.wait_for_room()
            self._channel.send("lines", stream=self._stream, text=text[begin : begin + _PART_CHARACTERS])

    def flush(self) -> None:
        """Do nothing: `write` sends at once."""
