from __future__ import annotations

import io
from pathlib import Path

from zero_launch import streams
from zero_launch.streams import Streamer


def show(tmp_path: Path, *pieces: bytes, colour: bool = False) -> str:
    """What is shown of a file that grows by these pieces, read after each of them and at the end."""
    path = tmp_path / "stdout.log"
    path.touch()
    sink = io.StringIO()
    streamer = Streamer()
    streamer.add({3: str(path)}, sink, colour=colour)
    for piece in pieces:
        with path.open("ab") as file:
            file.write(piece)
        streamer._pump(last=False)
    streamer.stop()
    return sink.getvalue()


def test_a_line_is_shown_whole_however_it_was_written(tmp_path):
    assert show(tmp_path, b"a", b"b\nc", b"d\n") == "[rank 3] ab\n[rank 3] cd\n"


def test_an_unfinished_last_line_is_shown_at_the_end(tmp_path):
    assert show(tmp_path, b"one\ntwo") == "[rank 3] one\n[rank 3] two\n"


def test_a_redrawn_line_is_shown_in_its_last_state(tmp_path):
    assert show(tmp_path, b"10%\r50%\r", b"100%\n") == "[rank 3] 100%\n"


def test_a_progress_bar_is_shown_now_and_then_while_it_moves(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_PROGRESS_SECONDS", -1.0)
    assert show(tmp_path, b"10%\r50%\r", b"70%\r", b"100%\n") == "[rank 3] 50%\n[rank 3] 70%\n[rank 3] 100%\n"


def test_bytes_that_are_not_text_do_not_stop_the_stream(tmp_path):
    assert show(tmp_path, b"\xff\nfine\n") == "[rank 3] \ufffd\n[rank 3] fine\n"


def test_a_terminal_gets_a_coloured_prefix(tmp_path):
    assert show(tmp_path, b"x\n", colour=True) == "\x1b[35m[rank 3]\x1b[0m x\n"


def test_a_closed_stream_is_remembered_and_not_written_again(tmp_path):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    (tmp_path / "log").write_text("x\n")
    streamer = Streamer()
    streamer.add({0: str(tmp_path / "log")}, Closed(), colour=False)
    streamer.stop()
    assert isinstance(streamer.broken, BrokenPipeError)
