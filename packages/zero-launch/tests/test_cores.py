from __future__ import annotations

import logging
import os

import pytest

import zero_launch
from zero_launch.cores import bindings, threads_per_rank, usable_cores, warn_of_one_thread


@pytest.mark.parametrize(("content", "expected"), [("150000 100000", 2), ("50000 100000", 1), ("100000 100000\n", 1)])
def test_a_control_groups_quota_caps_the_cores(tmp_path, monkeypatch, content, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "cpu.max").write_text(content)
    assert usable_cores(tmp_path / "cpu.max") == expected


@pytest.mark.parametrize("content", ["max 100000", None])
def test_without_a_quota_the_affinity_mask_counts(tmp_path, monkeypatch, content):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4})
    if content is not None:
        (tmp_path / "cpu.max").write_text(content)
    assert usable_cores(tmp_path / "cpu.max") == 3


def test_more_ranks_than_cores_get_one_thread_each():
    assert threads_per_rank(10_000) == 1


def test_the_list_of_public_names_is_sorted_and_exact():
    public = {n for n, v in vars(zero_launch).items() if not n.startswith("_") and callable(v)}
    assert zero_launch.__all__ == sorted(public)


def write_topology(system, nodes, siblings):
    for number, cpus in enumerate(nodes):
        folder = system / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for cpu, text in siblings.items():
        folder = system / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")


def test_ranks_are_laid_over_numa_nodes_with_hyperthreads_together(tmp_path, monkeypatch):
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    write_topology(tmp_path, ["0-1,4-5", "2-3,6-7"], siblings)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert bindings(2, system=tmp_path) == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert bindings(4, system=tmp_path) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert bindings(1, system=tmp_path) == [(0, 4, 1, 5, 2, 6, 3, 7)]
    assert bindings(3, system=tmp_path) == [(0, 4), (1, 5), (2, 6)]
    assert bindings(2, "0-1,2,6", system=tmp_path) == [(0, 1), (2, 6)]


def test_cores_that_cannot_be_given_are_refused(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(ValueError, match="3 ranks cannot be bound to 2 cores"):
        bindings(3)
    with pytest.raises(ValueError, match="may not use core 2, 3"):
        bindings(1, "1-3")
    with pytest.raises(ValueError, match="core 1 is named twice"):
        bindings(1, "0-1,1")


def test_the_first_rank_of_a_host_warns_where_ranks_have_one_thread_and_more_cores(monkeypatch, caplog):
    logger = logging.getLogger("zero_launch")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    share = threads_per_rank(1)
    warn_of_one_thread(1, 1, logger)
    assert share == 1 or [f"1 of this rank's {share} cores" in r.getMessage() for r in caplog.records] == [True]
    caplog.clear()
    warn_of_one_thread(4, 1, logger)
    warn_of_one_thread(1, 4, logger)  # one core each
    monkeypatch.setenv("LOCAL_RANK", "1")
    warn_of_one_thread(1, 1, logger)  # the first rank has said it
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("OMP_NUM_THREADS")
    warn_of_one_thread(1, 1, logger)  # the user's own choice, by torch.set_num_threads
    assert caplog.records == []
