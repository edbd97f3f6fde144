from __future__ import annotations

import os

import pytest

import zero_launch
from zero_launch.cores import threads_per_rank, usable_cores


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
