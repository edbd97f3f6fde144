"""Collectives of an accelerator are timed by its events: its `wait` returns before they have run."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulated_times as times
from simulated_accelerator.ranks import run_simulated

pytestmark = pytest.mark.timeout(600)  # the first one compiles


def test_seconds_waited_are_those_in_which_the_device_stood_still() -> None:
    (first, untimed, host, stops), _ = run_simulated(times.awaited, 2, True)
    open_seconds, waited = first
    assert stops == []
    assert host < times.LATE  # the host continued
    assert waited > times.LATE / 2 and open_seconds >= waited
    assert untimed == 0


def test_collectives_that_are_not_timed_are_counted_as_unknown() -> None:
    for seconds, untimed, _, stops in run_simulated(times.awaited, 2, False):
        assert (seconds, untimed, stops) == ((0.0, 0.0), 1, [])


def test_flight_recorder_finishes_an_entry_when_the_device_does(tmp_path: Path) -> None:
    (before, during, after), _ = run_simulated(times.recorded, 2, tmp_path)
    assert (before.finished, before.waiting) == (1, 0)
    assert during.finished == 1 and during.awaited is not None and during.awaited.name == "late"
    assert (after.finished, after.waiting) == (2, 0)
