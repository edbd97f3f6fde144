"""The host waits for the device in no step, and still learns what it has to."""

from __future__ import annotations

from collections import Counter

import pytest
import simulated_engines as engines
import simulated_stops as stops
from simulated_accelerator.ranks import run_simulated

pytestmark = pytest.mark.timeout(600)  # the first one compiles


def places(reports: list[stops.Report]) -> Counter[str]:
    """Count the stops by file and line."""
    return Counter(str(stop) for report in reports for stop in report.stops)


def test_gathers_do_not_read_placeholders() -> None:
    for reports in run_simulated(stops.by_step, 2, engines.config(3, "bf16"), range(4, 6)):
        assert not [place for place in places(reports) if "placeholder.py" in place and "issue_gather" in place]


@pytest.mark.parametrize("write", [stops.by_alias, stops.by_detached])
def test_write_into_a_placeholder_is_refused_by_name(write: object) -> None:
    for message in run_simulated(stops.written_placeholder, 2, write):
        assert "parameter 'blocks.1.up.weight' was written while it was released" in message
