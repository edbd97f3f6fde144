from __future__ import annotations

import itertools
import struct

import pytest

from zero_launch.desync import (
    FlightRecord,
    RecordedCollective,
    Watcher,
    deadlocked,
    difference,
    explain,
    read_flight_record,
    stall,
)

HEADER = struct.Struct("<8sIIIIQQQ")
SLOT = struct.Struct("<QQqQd24s16s112s64s")


def write_flight_record(path, names, *, waiting=0, slots=4, steps=()):
    """A flight recorder as zero-comm writes it, by its description."""
    data = bytearray(HEADER.pack(b"ZCRING01", slots, SLOT.size, 0, 2, len(names), waiting, 0).ljust(64, b"\0"))
    data += bytes(slots * SLOT.size)
    for number, (name, step) in enumerate(itertools.zip_longest(names, steps, fillvalue=5), start=1):
        row = (number, number, step, 64, 0.0, b"1", b"gather", name.encode(), b"train.py:3")
        SLOT.pack_into(data, 64 + (number - 1) % slots * SLOT.size, *row)
    path.write_bytes(data)


def record(names, waiting=0, first=1):
    entries = [RecordedCollective(n, n, 5, 64, "1", "gather", name, "") for n, name in enumerate(names, start=first)]
    return FlightRecord(tuple(entries), first + len(names) - 1, 0, waiting)


def test_a_ring_is_read_with_its_newest_entries(tmp_path):
    write_flight_record(tmp_path / "recorder", list("abcdef"), waiting=6)
    found = read_flight_record(tmp_path / "recorder")
    assert [entry.name for entry in found.entries] == list("cdef")
    assert str(found.awaited) == "gather of 'f' in step 5, 64 bytes at train.py:3"
    assert FlightRecord.from_json(found.to_json()) == found
    assert read_flight_record(tmp_path / "none") is None
    (tmp_path / "other").write_bytes(bytes(200))
    with pytest.raises(ValueError, match="not a flight recorder in format 1"):
        read_flight_record(tmp_path / "other")


@pytest.mark.parametrize("nbytes", [0, 20, 64, 64 + SLOT.size])
def test_a_flight_record_that_is_too_short_is_refused_by_its_path(tmp_path, nbytes):
    write_flight_record(tmp_path / "recorder", list("ab"))
    (tmp_path / "short").write_bytes((tmp_path / "recorder").read_bytes()[:nbytes])
    with pytest.raises(ValueError, match="short: not a flight recorder in format 1"):
        read_flight_record(tmp_path / "short")


def test_collectives_without_a_step_do_not_hide_the_step(tmp_path):
    for rank, steps in enumerate(([7, -1, -1], [-1, -1, -1])):
        write_flight_record(tmp_path / str(rank), list("abc"), waiting=3, steps=steps)
    watcher = Watcher({rank: tmp_path / str(rank) for rank in range(3)})
    watcher.read()
    assert str(watcher.records[0].awaited) == "gather of 'c', 64 bytes at train.py:3"
    assert [watcher.step_of(rank) for rank in range(3)] == [7, None, None]


def test_the_first_difference_is_found_and_ranks_that_agree_are_listed_together():
    records = {0: record("abcd"), 1: record("axcd"), 2: record("abcd")}
    text = difference(records)
    assert "collective 2 of the same group" in text
    assert "ranks 0, 2: gather of 'b' in step 5" in text and "rank 1: gather of 'x' in step 5" in text


def test_ranks_that_are_at_different_places_of_the_same_order_do_not_differ():
    records = {0: record("ab"), 1: record("abcdef"), 2: record("cdef", first=3)}
    assert difference(records) is None
    assert explain(records, stalled=False) is None


def test_a_stall_says_who_waits_for_what_the_others_did_not_ask_for():
    text = stall({0: record("ab", waiting=2), 1: record("abc", waiting=3)})
    assert "rank 1: gather of 'c' in step 5, 64 bytes, which rank 0 did not ask for" in text
    assert "rank 0: gather of 'b' in step 5, 64 bytes\n" in text + "\n"


def test_a_long_transfer_is_no_deadlock_and_a_collective_that_one_did_not_ask_for_is():
    assert not deadlocked({0: record("ab", waiting=2), 1: record("ab", waiting=2)})
    assert not deadlocked({0: record("abc", waiting=3), 1: record("ab", waiting=2)})  # rank 0 only went ahead
    gathers = [RecordedCollective(n + 1, n, 5, 64, "1", "gather", name, "") for n, name in enumerate("abc", start=1)]
    begin, forward = (
        RecordedCollective(n * n, n, 5, 0, "2", "control", name, "") for n, name in ((1, "begin"), (2, "forward"))
    )
    first = FlightRecord((begin, *gathers[:2], forward), 4, 0, 4)
    started = FlightRecord((begin, *gathers), 4, 0, 4)
    assert deadlocked({0: first, 1: started})
    assert explain({0: first, 1: started}, stalled=False) is None
    other = FlightRecord(
        tuple(RecordedCollective(e.number, e.sequence, 5, 64, "3", "gather", "z", "") for e in record("ab").entries),
        2,
        0,
        2,
    )
    assert not deadlocked({0: other, 1: record("ab", waiting=2)})  # groups of their own


def test_a_rank_that_asks_whether_the_others_failed_too_is_no_deadlock():
    asked = RecordedCollective(2, 1, 5, 0, "2", "control", "failed", "")
    gather = RecordedCollective(2, 1, 5, 64, "1", "gather", "a", "")
    begun = [RecordedCollective(1, 0, 5, 0, group, "control", "begin", "") for group in "12"]
    waits = FlightRecord((*begun, gather), 2, 0, 2)
    assert not deadlocked({0: waits, 1: FlightRecord((*begun, asked), 2, 0, 2)})
    other = RecordedCollective(2, 1, 5, 0, "2", "control", "step", "")
    assert deadlocked({0: waits, 1: FlightRecord((*begun, other), 2, 0, 2)})


def test_ranks_are_stalled_only_when_all_wait_and_nothing_moves(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    paths = {0: tmp_path / "0", 1: tmp_path / "1"}
    watcher = Watcher(paths)
    write_flight_record(paths[0], "ab", waiting=2)
    write_flight_record(paths[1], "ab")
    assert watcher.read_if_due()
    clock[0] += 10
    assert watcher.read_if_due() and not watcher.stalled  # rank 1 computes
    write_flight_record(paths[1], "abc", waiting=3)
    watcher.read()
    assert not watcher.stalled  # it moved just now
    clock[0] += 3
    watcher.read()
    assert watcher.stalled
