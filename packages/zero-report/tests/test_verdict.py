"""The verdict names what was made slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated import Simulation, simulate

from zero_report import RecordWriter, SpanKind
from zero_report.analysis import verdict
from zero_report.analysis.analyse import Analysis, analyse
from zero_report.analysis.causes import Causes, Share
from zero_report.page import figures
from zero_report.record.reader import read_run


def judged(path: Path, **what: object) -> Analysis:
    simulate(path, Simulation(**what))  # type: ignore[arg-type]
    return analyse(read_run(path))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_is_named(tmp_path: Path, ranks: int, slow: int) -> None:
    found = judged(tmp_path, ranks=ranks, compute={slow: 2.0})
    others = f"rank {1 - slow}" if ranks == 2 else "the others"
    assert found.verdict.sentence.startswith(f"Rank {slow} is slower than {others}, mostly in backward: ")
    assert found.causes.by_kind[0].share == pytest.approx(0.49, abs=0.03)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_data_loader_is_named_though_the_other_rank_waits_in_a_gather(tmp_path: Path, slow: int) -> None:
    found = judged(tmp_path, ranks=2, data={slow: 0.2})
    assert f"Rank {slow} waits for its data, between passes: 5" in found.verdict.sentence
    assert "the other rank waits for it" in found.verdict.sentence


def test_slow_data_loaders_of_all_ranks_are_one_cause(tmp_path: Path) -> None:
    found = judged(tmp_path, ranks=3, data={0: 0.2, 1: 0.2, 2: 0.2})
    assert found.verdict.sentence.startswith("The ranks wait for their data, between passes: 5")


def test_a_slow_disk_is_named_with_its_units_and_speed(tmp_path: Path) -> None:
    found = judged(tmp_path, ranks=2, units=12, disk={0: 0.01, 1: 0.01})
    assert found.verdict.sentence.startswith("The ranks wait for layers.0 to layers.11 (drive /mnt/nvme, shards in): ")
    assert "of its peak, 5.2 GB/s (fastest step of this run)" in found.verdict.sentence


def test_a_slow_disk_of_one_rank_is_named_with_the_rank(tmp_path: Path) -> None:
    found = judged(tmp_path, ranks=2, disk={1: 0.01})
    assert found.verdict.sentence.startswith("Rank 1 waits for layers.0 to layers.5 (drive /mnt/nvme, shards in): ")
    assert {loss.cause.rank for loss in found.causes.longest} == {1}


def test_a_run_that_waits_for_nothing_is_said_to_compute(tmp_path: Path) -> None:
    found = judged(tmp_path, ranks=2)
    start = "The ranks spend their time computing; no cause of waiting takes more than "
    assert found.verdict.sentence.startswith(start)
    assert found.verdict.tone == "good"


def test_every_waited_second_has_a_cause(tmp_path: Path) -> None:
    found = judged(tmp_path, ranks=3, steps=12, compute={2: 1.5}, disk={0: 0.002})
    run = read_run(tmp_path)
    waited = 0.0
    for record in run.last.ranks.values():
        rows = record.table["first"] > 2
        columns = ("gather_wait_s", "reduce_wait_s", "control_wait_s", "tier_wait_s", "data_s")
        waited += sum(float(record.table[c][rows & (record.table[c] == record.table[c])].sum()) for c in columns)
    assert sum(share.seconds for share in found.causes.by_kind) == pytest.approx(waited, rel=1e-3)


SKIPPED = " 5 of 20 steps were skipped, because a gradient was not finite."


@pytest.mark.parametrize(("every", "said"), [(4, SKIPPED), (30, "")])
def test_many_skipped_steps_are_said(tmp_path: Path, every: int, said: str) -> None:
    writer = RecordWriter(tmp_path, rank=0, world_size=1, background=False)
    for step in range(1, 21):
        writer.span(SpanKind.FORWARD, "forward", 0.0, 0.01)
        writer.end_step(loss=1.0, skipped=int(step % every == 0))
    writer.close()
    found = analyse(read_run(tmp_path)).verdict
    assert found.sentence == f"The ranks spend their time computing.{said}"
    assert found.tone == ("mixed" if said else "good")


def test_the_rank_that_costs_most_seconds_is_named_not_the_one_that_costs_one_rank_most() -> None:
    """Of 8 ranks rank 3 costs the 7 others 10 s each; rank 0 costs rank 5 11 s."""
    three = Share("rank", 3, 0.10, 1, 70.0, {"backward": 70.0})
    zero = Share("rank", 0, 0.11, 5, 11.0, {"forward": 11.0})
    both = Share("rank", -1, 0.21, 5, 81.0, {"backward": 70.0, "forward": 11.0})
    causes = Causes([3], 8, 800.0, [both], [zero, three], [], {})
    assert verdict._main_rank(both, causes) is three
    assert verdict._rank_sentence(both, causes, []).startswith("Rank 3 is slower than the others, mostly in backward")
    analysis = Analysis(verdict.Verdict("", "", "good"), causes, [], [])
    assert figures._main_ranks(both, analysis) == ["rank 3, backward: 10.0 %", "rank 0, forward: 11.0 %"]


def test_names_are_sorted_by_their_numbers_whatever_digits_they_hold() -> None:
    names = ["x.10", "x.9", "x.\u00b2", "x." + "9" * 5000, "x.09"]
    assert sorted(names, key=verdict._natural_key)[1:] == ["x.09", "x.10", "x." + "9" * 5000, "x.\u00b2"]
