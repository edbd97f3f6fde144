"""What a rank leaves in its recorder, and that it can be read while the rank runs."""

from __future__ import annotations

import importlib
import struct
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from zero_comm.flight_recorder import FlightRecorder, Ticket, call_site
from zero_comm.tag import Tag

HEADER = struct.Struct("<8sIIIIQQQ")
SLOT = struct.Struct("<QQqQd24s16s112s64s")


def entries(path: Path) -> tuple[tuple[int, ...], list[tuple[object, ...]]]:
    """The file as [Note: flight recorder format 1] describes it, read without the package."""
    data = path.read_bytes()
    magic, slots, slot_bytes, *header = HEADER.unpack_from(data)
    assert (magic, slot_bytes, len(data)) == (b"ZCRING01", SLOT.size, 64 + slots * SLOT.size)
    rows = [SLOT.unpack_from(data, 64 + n * slot_bytes) for n in range(slots)]
    return tuple(header), sorted(row for row in rows if row[0])


def test_the_newest_entries_are_there_in_order(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "recorder", rank=1, world_size=2, slots=4)
    for sequence in range(1, 7):
        recorder.record(b"7", sequence, Tag("gather", f"layers.{sequence}", 3), 64)
    header, rows = entries(tmp_path / "recorder")
    assert header == (1, 2, 6, 0, 0)
    assert [row[0] for row in rows] == [3, 4, 5, 6]
    number, sequence, step, same_bytes, _, group, phase, name, _ = rows[-1]
    assert (number, sequence, step, same_bytes) == (6, 6, 3, 64)
    text = [field.rstrip(b"\0").decode() for field in (group, phase, name)]  # type: ignore[attr-defined]
    assert text == ["7", "gather", "layers.6"]


def test_a_long_name_keeps_its_end(tmp_path: Path) -> None:
    FlightRecorder(tmp_path / "recorder", rank=0, world_size=1).record(b"", 1, Tag("gather", "x" * 200 + ".weight"), 0)
    name = entries(tmp_path / "recorder")[1][0][7]
    assert isinstance(name, bytes) and len(name) == 112 and name.endswith(b"x.weight")


def test_waiting_is_seen_and_ends(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "recorder", rank=0, world_size=1)
    number = recorder.record(b"", 1, Tag("gather", "w"), 0)
    recorder.begin_wait(number)
    assert entries(tmp_path / "recorder")[0][3:] == (1, 0)
    recorder.end_wait()
    assert entries(tmp_path / "recorder")[0][3:] == (0, 1)


def test_a_wait_that_failed_is_over_and_stays_the_first_cause_until_another_succeeds(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "recorder", rank=0, world_size=1)
    for name in ("w", "failed"):
        with suppress(RuntimeError), Ticket(recorder, recorder.record(b"", 1, Tag("gather", name), 0)):
            raise RuntimeError("the peer is gone")

    def words() -> tuple[int, ...]:
        return struct.unpack_from("<QQQQ", (tmp_path / "recorder").read_bytes(), 24)

    assert words() == (2, 0, 0, 1)
    with Ticket(recorder, recorder.record(b"", 1, Tag("gather", "w"), 0)):
        assert words() == (3, 3, 0, 1)
    assert words() == (3, 0, 1, 0)


class Done:
    """An event that the device has reached."""

    def query(self) -> bool:
        return True


def test_words_that_two_threads_change_are_changed_under_the_lock(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "recorder", rank=0, world_size=1)
    words, lock, changed = recorder._words, recorder._lock, []

    class LockedWords:
        def __getitem__(self, word: int) -> int:
            return words[word]

        def __setitem__(self, word: int, value: int) -> None:
            changed.append((word, lock.locked()))
            words[word] = value

    recorder._words = LockedWords()  # type: ignore[assignment]
    with Ticket(recorder, 1):
        pass
    with suppress(RuntimeError), Ticket(recorder, 2):
        raise RuntimeError("the peer is gone")
    device = Ticket(recorder, 3)
    with device:
        device.ends_with(Done())  # type: ignore[arg-type]
    assert {word for word, _ in changed} == {4, 5, 6}  # waiting, finished, failed
    assert [word for word, locked in changed if not locked] == []


def test_the_call_site_is_the_users_line() -> None:
    def library() -> bytes:
        return call_site()

    assert library().startswith(b"test_flight_recorder.py:")


def test_a_call_through_contextlib_has_the_line_of_the_with_block() -> None:
    found: list[bytes] = []
    with ExitStack() as stack:
        stack.callback(lambda: found.append(call_site()))
    assert found[0].startswith(b"test_flight_recorder.py:"), found


@pytest.mark.parametrize("installed", [True, False])
def test_the_call_site_is_in_no_installed_zero_package(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"zero_sample_{installed}".lower()
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("def called(then):\n    value = then()\n    return value\n")
    if installed:
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)

    def library() -> bytes:
        return call_site()

    site = importlib.import_module(name).called(library)
    assert site.startswith(b"test_flight_recorder.py:" if installed else b"__init__.py:2")


def test_a_group_name_that_comes_again_is_another_group(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "recorder", rank=0, world_size=1)
    assert [recorder.label_group(name) for name in ("1", "2", "1", "1")] == [b"1", b"2", b"1#2", b"1#3"]
