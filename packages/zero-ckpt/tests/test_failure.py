"""A checkpoint is complete or absent, whatever fails; damage is found and named; older checkpoints stay good."""

from __future__ import annotations

import logging
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import ThreadCoordinator, on_ranks

from zero_ckpt import (
    Checkpoint,
    CheckpointError,
    DamagedError,
    Interval,
    NotFoundError,
    open_checkpoint,
    restore,
    save_sharded,
)
from zero_ckpt.commit import Staging
from zero_ckpt.coordination import run_on_all_ranks
from zero_ckpt.latest import write_latest
from zero_ckpt.locking import try_lock


def save(root: Path, tag: str, step: int, data: bytes = b"abcdefgh") -> Path:
    return save_sharded(root, tag, [Interval("w", "param", (len(data),), "U8", 0, data)], step=step)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != "zero_to_fp32.py")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("failing", [0, 1])
def test_the_failure_of_one_rank_is_an_error_on_all_and_leaves_no_trace(
    tmp_path: Path, world_size: int, failing: int
) -> None:
    save(tmp_path, "good", 1)

    def fail() -> bytes:
        raise OSError(28, "No space left on device")

    def part(group: ThreadCoordinator) -> Path:
        data = fail if group.rank == failing else (lambda: b"x")
        mine = Interval("w", "param", (world_size,), "U8", group.rank, data, 1)
        return save_sharded(tmp_path, "bad", [mine], step=2, coordinator=group)

    for error in on_ranks(world_size, part):
        assert isinstance(error, CheckpointError)
        assert list(error.causes) == [failing] and "No space left" in error.causes[failing]
        assert f"rank {failing}" in str(error) and str(tmp_path / "bad") in str(error)
    assert names(tmp_path) == ["good", "latest"]
    assert open_checkpoint(tmp_path).read("w", "param") == b"abcdefgh"


def test_every_cause_is_carried_when_several_ranks_fail(tmp_path: Path) -> None:
    def part(group: ThreadCoordinator) -> Path:
        return save_sharded(tmp_path, "t", [], step=0, rank_state=object(), coordinator=group)

    for error in on_ranks(3, part):
        assert isinstance(error, CheckpointError) and list(error.causes) == [0, 1, 2]


def test_a_directory_that_the_ranks_do_not_share_is_told(tmp_path: Path) -> None:
    def part(group: ThreadCoordinator) -> Path:
        mine = Interval("w", "param", (2,), "U8", group.rank, b"x")
        return save_sharded(tmp_path / str(group.rank), "t", [mine], step=0, coordinator=group)

    for error in on_ranks(2, part):
        assert "must be shared by all ranks" in str(error)


def test_saving_a_tag_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, "t", 1, b"old")
    save(tmp_path, "t", 2, b"newer")
    assert names(tmp_path) == ["latest", "t"]
    assert open_checkpoint(tmp_path).read("w", "param") == b"newer"


def test_a_checkpoint_moved_aside_by_a_dead_save_is_still_found_and_put_back(tmp_path: Path) -> None:
    (save(tmp_path, "t", 1)).rename(tmp_path / ".replaced-t.0123456789ab")
    assert open_checkpoint(tmp_path).step == 1
    assert open_checkpoint(tmp_path, "t").step == 1
    save(tmp_path, "u", 2)
    assert names(tmp_path) == ["latest", "t", "u"]


def test_what_dead_saves_left_is_swept_and_what_lives_is_not(tmp_path: Path) -> None:
    dead = tmp_path / ".saving-t.aaaaaaaaaaaa"
    dead.mkdir(parents=True)
    (dead / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".saving-latest.bbbbbbbbbbbb").write_bytes(b"t")
    alive = Staging.create(tmp_path, "other", "cccc")
    save(tmp_path, "t", 1)
    assert names(tmp_path) == [alive.path.name, "latest", "t"]
    alive.discard()
    assert names(tmp_path) == ["latest", "t"]


def test_other_saves_do_not_wait_while_one_that_is_given_up_is_removed(tmp_path: Path) -> None:
    staging = Staging.create(tmp_path, "t", "aaaaaaaaaaaa")
    (staging.path / "rank-00000.safetensors").write_bytes(b"half")
    free: list[bool | None] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        """While the tree is removed, note whether the root can be locked."""
        if event == "call" and frame.f_code.co_name == "rmtree":
            root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
            free.append(try_lock(root))
            os.close(root)

    sys.setprofile(watch)
    try:
        staging.discard()
    finally:
        sys.setprofile(None)
    assert free == [True] and names(tmp_path) == []


def test_retention_keeps_the_newest_and_what_latest_names(tmp_path: Path) -> None:
    for step in range(5):
        save_sharded(tmp_path, f"s{step}", [], step=step, keep_last=2)
    assert names(tmp_path) == ["latest", "s3", "s4"]
    write_latest(tmp_path, "s3")
    save_sharded(tmp_path, "s9", [], step=9, keep_last=1, save_latest=False)
    assert names(tmp_path) == ["latest", "s3", "s9"]


def test_without_any_checkpoint_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no checkpoint"):
        open_checkpoint(tmp_path / "absent")
    save(tmp_path, "t", 1)
    with pytest.raises(NotFoundError, match="has no checkpoint 'u'"):
        open_checkpoint(tmp_path, "u")


@pytest.mark.parametrize("latest", ["../elsewhere", "/", "", ".", "a/b"])
def test_latest_leads_nowhere_but_to_a_tag(tmp_path: Path, latest: str) -> None:
    save(tmp_path / "elsewhere", "s9", 9)
    save(tmp_path / "run", "s1", 1)
    (tmp_path / "run" / "latest").write_text(latest)
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.tag == "s1" and checkpoint.report.skipped == ((latest, "`latest` does not hold a tag"),)


@pytest.mark.parametrize("harm", ["manifest byte", "manifest gone", "file cut", "file gone", "latest wrong"])
def test_the_last_good_checkpoint_is_opened_and_it_is_said(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "s1", 1)
    save(tmp_path, "s2", 2)
    newest = save(tmp_path, "s3", 3)
    data, manifest = newest / "rank-00000.safetensors", newest / "manifest.msgpack"
    if harm == "manifest byte":
        raw = bytearray(manifest.read_bytes())
        raw[40] ^= 1
        manifest.write_bytes(raw)
    elif harm == "manifest gone":
        manifest.unlink()
    elif harm == "file cut":
        data.write_bytes(data.read_bytes()[:-1])
    elif harm == "file gone":
        data.unlink()
    else:
        write_latest(tmp_path, "s4")
    with caplog.at_level(logging.WARNING, "zero_ckpt"):
        checkpoint = open_checkpoint(tmp_path)
    expected = "s3" if harm == "latest wrong" else "s2"
    assert checkpoint.tag == checkpoint.report.opened == expected
    assert checkpoint.report.skipped[0][0] == ("s4" if harm == "latest wrong" else "s3")
    assert f"opened checkpoint '{expected}'" in caplog.text
    if harm != "latest wrong":
        with pytest.raises((DamagedError, NotFoundError)):
            open_checkpoint(tmp_path, "s3")


def test_when_nothing_is_whole_nothing_is_opened(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, f"s{step}", step) / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(DamagedError, match="no whole checkpoint"):
        open_checkpoint(tmp_path)


def test_one_flipped_byte_anywhere_is_found_and_named(tmp_path: Path, rng: random.Random) -> None:
    path = save(tmp_path, "t", 1, rng.randbytes(3000))
    data = path / "rank-00000.safetensors"
    good = data.read_bytes()
    for position in [*range(120), *rng.sample(range(120, len(good)), 200)]:
        bad = bytearray(good)
        bad[position] ^= 1 << rng.randrange(8)
        data.write_bytes(bad)
        with pytest.raises(DamagedError) as caught:
            open_checkpoint(tmp_path).read("w", "param")
        assert str(data) in str(caught.value)
        if position >= 4096:
            assert "'w'" in str(caught.value)
    manifest = path / "manifest.msgpack"
    data.write_bytes(good)
    good = manifest.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << rng.randrange(8)
        manifest.write_bytes(bad)
        with pytest.raises(CheckpointError, match="manifest"):
            open_checkpoint(tmp_path)


def test_ranks_open_the_checkpoint_that_is_whole_for_all(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / str(rank), "s1", 1)
        save(tmp_path / str(rank), "s2", 2)
    (tmp_path / "1" / "s2" / "rank-00000.safetensors").unlink()

    def part(group: ThreadCoordinator) -> str:
        return open_checkpoint(tmp_path / str(group.rank), coordinator=group).tag

    assert on_ranks(2, part) == ["s1", "s1"]


def test_damage_met_while_loading_sends_all_ranks_back_to_the_last_good_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, f"s{step}", step, bytes([step]) * 8)
    data = tmp_path / "s2" / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"!")

    def part(group: ThreadCoordinator) -> tuple[str, bytes]:
        def fill(checkpoint: Checkpoint) -> bytes:  # only rank 1 touches the damaged tensor
            return bytes(checkpoint.read("w", "param")) if group.rank == 1 else b""

        checkpoint, result = restore(tmp_path, fill, coordinator=group)
        assert checkpoint.report.skipped[0][0] == "s2" and "are damaged" in checkpoint.report.skipped[0][1]
        return checkpoint.tag, result

    assert on_ranks(2, part) == [("s1", b""), ("s1", b"\1" * 8)]
    with pytest.raises(DamagedError, match=r"'w' \(param\) in .*s2/rank-00000.safetensors: elements 0 to 8") as raised:
        restore(tmp_path, lambda checkpoint: checkpoint.read("w", "param"), "s2")
    advice = str(raised.value).splitlines()[-1]
    assert f"`zero-ckpt verify {tmp_path}`" in advice and advice.endswith("or open another tag: s1")


def test_a_failure_of_this_rank_and_that_of_the_exchange_are_both_told(tmp_path: Path) -> None:
    class Gone(ThreadCoordinator):
        def all_gather_object(self, obj: object) -> list[object]:
            raise ConnectionError("peer closed the connection")

    def part() -> None:
        raise FileNotFoundError("the others have removed it")

    def told(group: ThreadCoordinator) -> Any:
        return run_on_all_ranks(Gone(group.rank, group.world_size, group._barrier, group._slots), "saving", part)

    (error,) = on_ranks(1, told)
    assert isinstance(error, CheckpointError)
    assert "the others have removed it" in str(error) and "peer closed the connection" in str(error)


def test_a_rank_that_disappears_is_a_typed_error_for_the_others(tmp_path: Path) -> None:
    save(tmp_path, "good", 1)

    class Broken(ThreadCoordinator):
        calls = 0

        def all_gather_object(self, obj: object) -> list[object]:
            self.calls += 1
            if self.calls > 2:
                raise ConnectionError("peer closed the connection")
            return super().all_gather_object(obj)

    def part(group: ThreadCoordinator) -> Path:
        broken = Broken(group.rank, group.world_size, group._barrier, group._slots)
        mine = Interval("w", "param", (2,), "U8", group.rank, b"x")
        return save_sharded(tmp_path, "bad", [mine], step=2, coordinator=broken)

    for error in on_ranks(2, part):
        assert isinstance(error, CheckpointError) and "peer closed the connection" in str(error)
    assert names(tmp_path) == ["good", "latest"]
