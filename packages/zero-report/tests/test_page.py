"""The page as data and as text: bounded, exact, safe whatever a run is called."""

from __future__ import annotations

import base64
import gzip
import json
import multiprocessing
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated import Simulation, simulate

from zero_report import PageTable, RecordWriter, SpanKind, read_run, table_page, write_report
from zero_report.analysis.analyse import analyse
from zero_report.analysis.causes import Causes, Share
from zero_report.page.data import page_data
from zero_report.page.steps import shown_ranks
from zero_report.record.reader import Attempt, RankRecord

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`${alert(3)}&lt;\u2028{}"


def data_of(page: Path) -> dict[str, Any]:
    """What a browser would read from a page."""
    match = re.search(r'<script type="application/gzip" id="data">([^<]*)</script>', page.read_text(encoding="utf-8"))
    assert match is not None
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return data


def test_totals_of_the_page_are_the_sums_of_the_record(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(ranks=3, steps=50, compute={1: 1.4}, disk={0: 0.003}))
    totals = data_of(write_report(tmp_path))["totals"]
    tables = [record.table for record in read_run(tmp_path).last.ranks.values()]
    assert totals["sent_bytes"] == sum(int(table["sent_bytes"].sum()) for table in tables)
    assert totals["read_bytes"] == int(np.nansum([np.nansum(table["read_bytes"]) for table in tables]))
    assert totals["collectives"] == 3 * 50 * 12
    assert totals["seconds"] == pytest.approx(float(tables[0]["seconds"].sum()), rel=1e-12)
    inside = totals["compute"] + sum(totals["waits"].values()) + totals["phases"]["data"]
    assert inside == pytest.approx(totals["rank_seconds"], rel=1e-6)


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(ranks=2, steps=30, close=False))
    simulate(tmp_path, Simulation(ranks=2, steps=20, attempt=1, first_step=21))
    data = data_of(write_report(tmp_path))
    assert (data["totals"]["steps"], data["totals"]["replayed"], data["attempts"]) == (40, 10, 2)
    assert data["curves"]["step"] == list(range(1, 41))


FLIGHT = [
    {"rank": 0, "waits": "7: reduce of 'h.1' in step 4", "last": ["6: gather of 'h.0' in step 4", HOSTILE]},
    {"rank": 1, "waits": None, "last": []},
]


def test_the_flight_records_of_all_ranks_are_in_the_page(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(steps=3, close=False))
    failure = {"text": "the ranks ask for different things", "detail": "rank 1: x", "flight": [*FLIGHT, "noise"]}
    (tmp_path / "failure.json").write_text(json.dumps(failure))
    data = data_of(write_report(tmp_path))
    assert data["verdict"]["ended"] == "the ranks ask for different things"
    assert data["flight"] == FLIGHT


def test_each_start_and_how_the_one_before_it_ended_are_events(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(ranks=2, steps=12, close=False))
    simulate(tmp_path, Simulation(ranks=3, steps=6, attempt=1, first_step=10))
    simulate(tmp_path, Simulation(ranks=3, steps=4, attempt=2, first_step=16))
    events = [(row["kind"], row["step"], row["text"]) for row in data_of(write_report(tmp_path))["events"]]
    assert events == [
        ("end", 12, "start 1: Both ranks stopped after step 12: they were killed, or their machine was lost."),
        ("start", 10, "start 2 continues at step 10 with 3 ranks; 3 steps are done again"),
        ("end", 15, "start 2 ended"),
        ("start", 16, "start 3 continues at step 16 with 3 ranks"),
    ]


def test_a_rank_that_stopped_without_a_word_comes_before_failures_that_followed(tmp_path: Path) -> None:
    for rank in range(3):
        writer = RecordWriter(tmp_path, rank=rank, world_size=3, background=False)
        writer.end_step(loss=1.0)
        writer.flush()
        if rank != 1:
            writer.note("failure", text="PeerError: rank 1 left", follows=True)
            writer.close()
    assert data_of(write_report(tmp_path))["verdict"]["ended"].startswith("Rank 1 stopped after step 1: it was killed")
    with_cause = RecordWriter(tmp_path, rank=2, world_size=3, attempt=1, background=False)
    with_cause.note("failure", text="PeerError: rank 0 left", follows=True)
    with_cause.note("failure", text="ValueError: bad batch")
    with_cause.close()
    assert data_of(write_report(tmp_path))["verdict"]["ended"] == "Rank 2 failed first: ValueError: bad batch"


def test_an_interrupted_step_that_hung_is_named_with_the_rank_that_others_waited_for(tmp_path: Path) -> None:
    live_ranks(tmp_path, (4, 4), began=90.0, apart=1)
    failure = {"at": time.time(), "text": "interrupted by SIGINT", "interrupted": True}
    (tmp_path / "failure.json").write_text(json.dumps(failure))
    verdict = data_of(write_report(tmp_path))["verdict"]
    assert verdict["ended"] == (
        "Step 5 hung: it had lasted 90 s, 90 times the usual, when the run was ended; "
        "rank 1 was in the data loader or the script, and others waited for it."
    )
    assert verdict["detail"].splitlines() == [
        "interrupted by SIGINT",
        "",
        "what ranks were in when they last wrote:",
        "rank 0, step 5: in backward for 90.0 s, reduce of h.1 under way for 90.0 s",
        "rank 1, step 5: in the data loader or the script for 90.0 s",
        "rank 0 has waited 5 s",
    ]


def live_ranks(path: Path, steps: tuple[int, ...], *, began: float = 0.0, apart: int | None = None) -> None:
    """Records of ranks that live: rank r has ended ``steps[r]`` steps and is in a reduction since ``began``; rank
    ``apart`` waits for its data."""
    clocks = [100.0] * len(steps)
    for rank, count in enumerate(steps):
        running = [(SpanKind.BACKWARD, "backward", 100.0 + count, 0), (SpanKind.REDUCE, "h.1", 100.0 + count, 8)]
        if rank == apart:
            running = [(SpanKind.DATA, "data", 100.0 + count, 0)]
        writer = RecordWriter(
            path,
            rank=rank,
            world_size=len(steps),
            background=False,
            clock=lambda rank=rank: clocks[rank],  # type: ignore[misc]
            under_way=lambda running=running: running,  # type: ignore[misc]
        )
        for _ in range(count):
            writer.span(SpanKind.FORWARD, "forward", clocks[rank], clocks[rank] + 0.9)
            clocks[rank] += 1.0
            writer.end_step(loss=1.0)
        clocks[rank] += began
        writer._unix = time.time() - clocks[rank]
        if apart is not None and rank != apart:
            writer.note("warning", text=f"rank {rank} has waited 5 s")
        writer.flush()


def test_a_run_that_goes_on_is_no_failure(tmp_path: Path) -> None:
    live_ranks(tmp_path, (4, 4), began=0.5)
    verdict = data_of(write_report(tmp_path))["verdict"]
    assert verdict["ended"] == "The run continues; it is in step 5."
    assert verdict["tone"] != "bad"
    assert verdict["steps"] == 2  # the third and the fourth, without the one that is under way


def test_a_step_that_lasts_much_longer_than_others_is_said_to_hang_with_what_each_rank_is_in(tmp_path: Path) -> None:
    live_ranks(tmp_path, (4, 3), began=90.0)
    data = data_of(write_report(tmp_path))
    verdict = data["verdict"]
    assert verdict["ended"] == "Step 4 has lasted 90 s, 90 times the usual, and may hang."
    assert verdict["detail"].splitlines() == [
        "rank 0, step 5: in backward for 90.0 s, reduce of h.1 under way for 90.0 s",
        "rank 1, step 4: in backward for 90.0 s, reduce of h.1 under way for 90.0 s",
    ]
    last = data["steps"]["steps"][-1]
    found = [(rank["rank"], rank["step"], rank["under_way"]) for rank in last["ranks"]]
    assert found == [(0, 5, [0, 1]), (1, 4, [0, 1])]


def test_the_first_rank_that_stopped_writing_is_named(tmp_path: Path) -> None:
    for rank, seconds in enumerate((100.0, 40.0, 100.0)):
        clock = [0.0]
        writer = RecordWriter(
            tmp_path,
            rank=rank,
            world_size=3,
            background=False,
            clock=lambda clock=clock: clock[0],  # type: ignore[misc]
        )
        writer._unix = 1.7e9
        clock[0] = seconds
        writer.end_step(loss=1.0)
        writer.flush()
    verdict = data_of(write_report(tmp_path))["verdict"]
    assert verdict["ended"].startswith("Rank 1 stopped first after step 1; 2 more did later: it was killed, or")


def test_with_many_ranks_the_strip_shows_those_that_cause_and_lose_most_whatever_their_numbers(tmp_path: Path) -> None:
    shares = [Share("rank", 200 - 2 * place, 0.5 - place / 100, 199 - 2 * place, 1.0) for place in range(20)]
    ranks = {rank: RankRecord(rank, {}, {"seconds": np.array([1.0 + (rank + 30) % 90])}, []) for rank in range(256)}
    shown = shown_ranks(Attempt(0, ranks), Causes([1], 256, 1.0, [], shares, [], {}))
    assert {0, 200, 199, 198, 197} < set(shown) and len(shown) <= 20
    assert {60, 150, 149, 239} <= set(shown)  # the fastest and the slowest two


def test_what_was_done_for_each_unit_adds_up(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(ranks=2, steps=12, units=3, disk={0: 0.01}))
    data = data_of(write_report(tmp_path))
    units = {row["name"]: row for row in data["units"]}
    assert set(units) == {"layers.0", "layers.1", "layers.2"}
    for row in units.values():
        assert (row["gathered"], row["reduced"], row["messages"]) == (50 << 20, 50 << 20, 2)
        assert row["read"] == 50 << 20  # twice, by one rank of two
        assert row["computed"] == pytest.approx(0.010, rel=0.05)
        assert 0.009 < row["waited"] < 0.025
        assert re.match(r"\d+ %: drive, shards in: layers.\d on rank 0$", row["cause"])


def test_a_noted_peak_of_drives_is_that_of_every_drive_in_its_direction(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, rank=0, world_size=1, background=False)
    writer.note("peak", link="drive in", bytes_per_second=4e9, source="a plan")
    for _ in range(5):
        now = time.perf_counter()
        for hop, kind in (
            ("states in", SpanKind.TIER_READ),
            ("states out", SpanKind.TIER_WRITE),
            ("copies", SpanKind.TIER_READ),
        ):
            drive = "drive, " if " " in hop else ""
            writer.span(kind, f"{drive}{hop}: x", now, now + 0.001, 0.0, 2_000_000)
        writer.end_step()
    writer.close()
    links = {link["name"]: link for link in data_of(write_report(tmp_path))["links"]}
    assert (links["drive, states in"]["peak"], links["drive, states in"]["source"]) == (4_000_000_000, "a plan")
    assert links["drive, states in"]["rate"] == pytest.approx(2e9)
    assert links["drive, states out"]["source"] == links["copies"]["source"] == "fastest step of this run"


def test_memory_of_a_step_that_was_not_looked_at_is_that_of_one_that_was(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, rank=0, world_size=1, background=False)
    for step in range(200):
        now = time.perf_counter()
        writer.span(SpanKind.FORWARD, "forward", now - 1e-3, now)
        if step == 101:
            writer.memory({"states": 8}, process=16)
        writer.end_step(loss=1.0)
    writer.close()
    steps = data_of(write_report(tmp_path))["steps"]["steps"]
    assert [step["step"] for step in steps if step["ranks"][0]["memory"]] == [102]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    record = tmp_path / "record"
    rows = [[HOSTILE, HOSTILE, HOSTILE, HOSTILE]]
    simulate(
        record,
        Simulation(
            ranks=2, steps=6, names="{}" + HOSTILE, disk={1: 0.02}, configuration=rows, facts={"title": HOSTILE}
        ),
    )
    page = write_report(record)
    text = page.read_text(encoding="utf-8")
    assert "alert(" not in re.sub(r"<title>.*?</title>", "", text)
    assert text.count("<script") == 3 and text.count("</script>") == 3
    assert data_of(page)["title"] == HOSTILE


def test_what_json_and_the_format_cannot_hold_does_not_stop_the_page(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(ranks=1, steps=3, facts={"title": "\ud800 lone", "versions": {"x": float("nan")}}))
    assert data_of(write_report(tmp_path))["versions"] == {"x": None}


def test_a_record_without_a_finished_step_is_a_page_too(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(ranks=2, steps=0, close=False))
    data = data_of(write_report(tmp_path))
    assert data["verdict"]["sentence"] == "No step of this run is over yet."
    assert data["verdict"]["ended"].startswith("Both ranks stopped before a step was over: ")


def test_problems_of_the_record_are_said_on_the_page(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(ranks=2, steps=5))
    file = tmp_path / "attempt-0000" / "rank-00001.table"
    file.write_bytes(file.read_bytes()[:-20])
    assert "rank-00001.table: 1 damaged or cut line" in data_of(write_report(tmp_path))["problems"][0]


def test_two_runs_beside_each_other_differ_where_they_differ(tmp_path: Path) -> None:
    simulate(tmp_path / "a", Simulation(ranks=2, steps=20))
    changed = [["zero_optimization.stage", 2, "user", ""], ["train_batch_size", 64, "user", ""]]
    simulate(tmp_path / "b", Simulation(ranks=2, steps=20, unit_s=0.02, configuration=changed))
    other = data_of(write_report(tmp_path / "a", compare=tmp_path / "b"))["other"]
    assert ["zero_optimization.stage", 3, 2] in other["configuration"]
    assert "train_batch_size" not in [row[0] for row in other["configuration"]]
    step = next(row for row in other["figures"] if row["name"] == "seconds of a step")
    assert step["there"] / step["here"] == pytest.approx(2, rel=0.05)


def test_every_figure_of_two_runs_is_beside_that_of_the_other(tmp_path: Path) -> None:
    simulate(tmp_path / "a", Simulation(ranks=2, steps=20, disk={0: 0.01, 1: 0.01}))
    simulate(tmp_path / "b", Simulation(ranks=2, steps=20, compute={1: 2.0}))
    data = data_of(write_report(tmp_path / "a", compare=tmp_path / "b"))
    rows = {row["name"]: (row["here"], row["there"]) for row in data["other"]["figures"]}
    totals, (cause, *_), (link, *_) = data["totals"], data["causes"], data["links"]
    here = {name: figures[0] for name, figures in rows.items()}
    assert here["computing, share of the time"] == pytest.approx(totals["compute"] / totals["rank_seconds"], rel=1e-5)
    assert here["collectives per step, all ranks"] == totals["collectives"] / totals["steps"]
    assert here["seconds of all steps"] == pytest.approx(totals["seconds"], rel=1e-5)
    assert cause["kind"] == "tier"
    assert here["lost by tiers, share of the step"] == pytest.approx(cause["share"], rel=1e-5)
    assert rows["lost by slower ranks, share of the step"][1] > 0.2
    assert link["name"] == "drive /mnt/nvme, shards in"
    assert rows["drive, shards in, bytes per second"] == (pytest.approx(link["rate"], rel=1e-5), None)


def test_a_day_on_64_ranks_is_less_than_two_megabytes(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(ranks=64, steps=10, units=24))
    run = read_run(tmp_path)
    for record in run.last.ranks.values():  # a day: as many rows as a table of 64 ranks holds, of 500 steps each
        rows = np.arange(3000)
        columns = {name: np.resize(column, 3000) for name, column in record.table.items()}
        columns["loss"] = np.random.default_rng(0).random(3000)
        record.table = {**columns, "first": rows * 500.0 + 1, "steps": np.full(3000, 500.0)}
    from zero_report.page.html import render

    page = render(page_data(run, analyse(run)))
    print(f"{len(page):,} bytes")
    assert len(page) < 2_000_000


def write_ranks(path: Path, ranks: range, world_size: int, steps: int) -> None:
    """Write the records of ``ranks`` one after the other, each as it would write itself; rank 77 is the slow one."""
    from simulated import Clock

    for rank in ranks:
        clock = Clock()
        writer = RecordWriter(path, rank=rank, world_size=world_size, clock=clock, background=False)
        writer._unix = 1.7e9
        compute = 0.09 if rank == 77 else 0.06
        for step in range(1, steps + 1):
            begin = clock.now
            if step % 250 == 0:
                for unit in range(10):
                    start, end = begin + 0.008 * unit + compute / 20, begin + 0.008 * (unit + 1)
                    writer.span(SpanKind.GATHER, f"layers.{unit}", start, end, end - start, 1 << 20)
                writer.memory({"parameters": 1 << 30}, process=2 << 30)
            writer.span(SpanKind.FORWARD, "forward", begin, begin + 0.1)
            writer.count("sent_bytes", 10 << 20)
            clock.now = begin + 0.1
            writer.end_step(loss=3.0 / step, lr=1e-4, samples=4096)
            if step % 500 == 0:
                writer.flush()
        writer.close()


LARGE = """
import resource, sys, time
from zero_report import write_report
begin = time.monotonic()
page = write_report(sys.argv[1])
print(time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, page.stat().st_size)
"""


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_1024_ranks_times_10000_steps(tmp_path: Path) -> None:
    begin = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    halves = [
        spawn.Process(target=write_ranks, args=(tmp_path, half, 1024, 10_000))
        for half in (range(512), range(512, 1024))
    ]
    for half in halves:
        half.start()
    for half in halves:
        half.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime
    seconds = f"{time.monotonic() - begin:.0f} s, {processor:.0f} s of processor time"
    print(f"record, two processes: {seconds}, {used.ru_maxrss / 2**20:.2f} GiB")
    assert processor / len(halves) <= 60
    done = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True, check=True)
    seconds, memory, size = map(float, done.stdout.split())
    print(f"page: {seconds:.1f} s, {memory / 2**30:.2f} GiB, {size / 1e6:.2f} MB")
    assert memory <= 1 << 30
    assert size <= 5_000_000


def test_a_page_of_tables_shows_texts_as_texts_and_runs_nothing(tmp_path: Path) -> None:
    rows = [("device", "1.5 GB", "+3.0%"), (HOSTILE, "", "-1.0%")]
    page = table_page(HOSTILE, [PageTable("memory", ("tier", "bytes", "error"), rows, note=HOSTILE)], sentence=HOSTILE)
    text = page.save(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<script" not in text and "<img" not in text and text.count("&lt;/script&gt;") == 10
    assert '<td class="number">1.5 GB</td><td class="number">+3.0%</td>' in text and '<td class="name">device' in text
    assert (
        "prefers-color-scheme: dark" in text and "--ground: #14171a" in text.partition("prefers-color-scheme: dark")[2]
    )


def test_the_same_failure_in_two_attempts_is_two_events(tmp_path: Path) -> None:
    for attempt in range(2):
        for rank in range(2):
            writer = RecordWriter(tmp_path, rank=rank, world_size=2, attempt=attempt, first_step=3, background=False)
            writer.note("failure", text="ValueError: bad batch")
            writer.close()
    events = [event for event in data_of(write_report(tmp_path))["events"] if event["kind"] == "failure"]
    assert [event["ranks"] for event in events] == [[0, 1], [0, 1]]
