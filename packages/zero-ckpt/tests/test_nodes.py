"""Nodes without a common file system each keep what their ranks need; together it is an ordinary checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ranks import ThreadCoordinator, on_ranks

from zero_ckpt import CheckpointError, DamagedError, Interval, open_checkpoint, save_sharded, verify

WORLD = 4


def root_of(tmp_path: Path, rank: int) -> Path:
    return tmp_path / f"node{rank // 2}"


def save(group: ThreadCoordinator, tmp_path: Path, step: int) -> Path:
    shard = Interval("w", "param", (WORLD * 3,), "U8", group.rank * 3, bytes([group.rank] * 3))
    everywhere = Interval("count", "buffer", (5,), "U8", 0, b"alike")
    node = f"node{group.rank // 2}"
    return save_sharded(
        root_of(tmp_path, group.rank),
        f"s{step}",
        [shard, everywhere],
        step=step,
        coordinator=group,
        node=node,
        keep_last=2,
    )


def test_each_node_reads_what_its_ranks_wrote_and_what_all_hold(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        assert on_ranks(WORLD, lambda group, step=step: save(group, tmp_path, step)) == [
            root_of(tmp_path, rank) / f"s{step}" for rank in range(WORLD)
        ]

    def read(group: ThreadCoordinator) -> bytes:
        checkpoint = open_checkpoint(root_of(tmp_path, group.rank), coordinator=group)
        assert checkpoint.step == 3 and checkpoint.read("count", "buffer") == b"alike"
        return bytes(checkpoint.read("w", "param", group.rank * 3, 3))

    assert on_ranks(WORLD, read) == [bytes([rank] * 3) for rank in range(WORLD)]
    for node in (0, 1):
        root = tmp_path / f"node{node}"
        assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["s2", "s3"]
        report = verify(root / "s3")
        assert report.ok and len(report.absent) == 2


def test_what_another_node_has_is_an_error_until_the_files_are_brought_together(tmp_path: Path) -> None:
    on_ranks(WORLD, lambda group: save(group, tmp_path, 1))
    here, there = tmp_path / "node0", tmp_path / "node1" / "s1"
    with pytest.raises(DamagedError, match="rank-00002.safetensors: No such file"):
        open_checkpoint(here).read("w", "param")
    for file in there.glob("rank-*"):
        shutil.copy(file, here / "s1")
    assert open_checkpoint(here).read("w", "param") == bytes([0] * 3 + [1] * 3 + [2] * 3 + [3] * 3)
    assert verify(here / "s1").absent == []


def test_all_ranks_name_their_node_or_none(tmp_path: Path) -> None:
    def part(group: ThreadCoordinator) -> Path:
        return save_sharded(tmp_path, "t", [], step=0, coordinator=group, node="a" if group.rank else None)

    for error in on_ranks(2, part):
        assert isinstance(error, CheckpointError) and "all ranks name their node, or none does" in str(error)
