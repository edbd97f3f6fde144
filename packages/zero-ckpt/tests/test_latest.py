"""The file `latest` leads to the checkpoint that was saved last, or it is said why not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero_ckpt import CheckpointError, Interval, open_checkpoint, save_sharded
from zero_ckpt.cli import main
from zero_ckpt.latest import decode_latest, encode_latest, read_latest


def save(root: Path, tag: str, step: int) -> Path:
    return save_sharded(root, tag, [Interval("w", "param", (4,), "U8", 0, bytes([step]) * 4)], step=step)


def test_other_readers_strip_it_to_the_tag(tmp_path: Path) -> None:
    save(tmp_path, "global_step3", 3)
    raw = (tmp_path / "latest").read_text()
    assert raw.strip() == raw.splitlines()[0] == "global_step3" and len(raw.encode()) == 12 + 1 + 64


@pytest.mark.parametrize("text", ["global_step1", "global_step1\n", "global_step1\r\n", " global_step1 \n\n"])
def test_one_that_was_written_by_hand_or_by_an_earlier_version_is_believed(tmp_path: Path, text: str) -> None:
    save(tmp_path, "global_step1", 1)
    save(tmp_path, "global_step2", 2)
    (tmp_path / "latest").write_text(text)
    assert open_checkpoint(tmp_path).step == 1


def test_a_flipped_bit_never_opens_another_checkpoint_in_silence(tmp_path: Path) -> None:
    for step in (5, 6, 7):  # one bit apart
        save(tmp_path, f"global_step{step}", step)
    good = (tmp_path / "latest").read_bytes()
    told, positions = 0, [*range(8 * 13), *range(8 * 13, 8 * len(good), 11)]
    for position in positions:
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        (tmp_path / "latest").write_bytes(bad)
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.step == 7, position
        told += bool(checkpoint.report.skipped)
    assert told > 0.9 * len(positions)  # a changed line feed may still read as the same tag


def test_every_tag_survives_its_encoding() -> None:
    for tag in ("a", "step 1", "ü" * 100, "global_step1" * 10):
        assert decode_latest(encode_latest(tag), "latest") == tag


@pytest.mark.parametrize("tag", ["s1 ", "\ts1", "a\nb", "s1\r", "\u2028"])
def test_a_tag_that_readers_of_latest_would_not_get_back_is_not_saved(tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="no space at its beginning or end and one line"):
        save(tmp_path, tag, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "latest", "../run/s1"])
def test_verify_says_of_a_latest_that_it_holds_no_tag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    save(tmp_path / "run", "s1", 1)
    (tmp_path / "run" / "latest").write_text(text)
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert f"`latest` names {text!r}, but there is no such checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["directory", "loop", "link", "pipe", "huge"])
def test_what_is_no_small_file_is_passed_over_and_named(tmp_path: Path, kind: str) -> None:
    save(tmp_path, "s1", 1)
    save(tmp_path, "s2", 2)
    latest = tmp_path / "latest"
    latest.unlink()
    if kind == "directory":
        latest.mkdir()
    elif kind == "loop":
        latest.symlink_to("latest")
    elif kind == "link":
        (tmp_path / "other").write_text("s1")
        latest.symlink_to("other")
    elif kind == "pipe":
        os.mkfifo(latest)
    else:
        with latest.open("wb") as file:
            file.truncate(12 << 30)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.step == 2 and "latest" in checkpoint.report.skipped[0][1]
    assert main(["verify", str(tmp_path)]) == 1
    if kind == "directory":
        with pytest.raises(CheckpointError, match="latest is a directory, but must be the file"):
            save(tmp_path, "s3", 3)
        assert not (tmp_path / "s3").exists()
        latest.rmdir()
    save(tmp_path, "s3", 3)
    assert read_latest(tmp_path) == "s3" and not latest.is_symlink()
