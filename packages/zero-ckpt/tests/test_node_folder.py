"""The folder in a node's memory that is named for a run, and a word of what other runs have left there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from zero_ckpt.torch import node_memory_folder
from zero_ckpt.torch.node_folder import warn_of_other_runs


def test_each_run_has_a_folder_of_its_own_that_names_the_user() -> None:
    one, other = node_memory_folder("/runs/one"), node_memory_folder("/runs/other")
    assert one != other and one == node_memory_folder("/runs/one")
    assert one.name.startswith(f"zero-{os.geteuid()}-") and not one.is_relative_to("/runs")


@pytest.mark.parametrize("part", ["", "mp_rank_00"])
def test_a_run_learns_what_other_runs_of_its_user_hold_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    mine = tmp_path / node_memory_folder("/runs/one").name
    for folder in (mine, mine / "mp_rank_00", tmp_path / "zero-of-somebody"):
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(5 << 20))
    with caplog.at_level(logging.WARNING, "zero_ckpt"):
        warn_of_other_runs(mine / part)
    assert caplog.messages == []

    other = tmp_path / node_memory_folder("/runs/other").name
    (other / "step3").mkdir(parents=True)
    (other / "step3" / "weights").write_bytes(bytes(3 << 20))
    with caplog.at_level(logging.WARNING, "zero_ckpt"):
        warn_of_other_runs(mine / part)
    assert len(caplog.messages) == 1 and str(other) in caplog.messages[0] and "3.0 MiB" in caplog.messages[0]
    assert str(mine) not in caplog.messages[0]


def test_a_folder_that_the_user_has_named_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / node_memory_folder("/runs/other").name).mkdir()
    warn_of_other_runs(tmp_path / "mine")
    assert caplog.messages == []
