"""A conversion follows no link beside its output, hangs on no pipe there, and refuses arguments that make no sense."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from converted import checkpoint  # noqa: E402

from zero_ckpt import CheckpointError, convert, save_sharded  # noqa: E402
from zero_ckpt.latest import read_latest  # noqa: E402
from zero_ckpt.plain import pack  # noqa: E402


@pytest.mark.parametrize("target", ["out.safetensors", "out.bin"])
def test_a_link_under_the_name_of_the_unfinished_file_is_not_followed(tmp_path: Path, target: str) -> None:
    checkpoint(tmp_path / "ckpt")
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / f"{target}.partial").symlink_to(victim)
    try:
        convert(tmp_path / "ckpt", tmp_path / target)
    except OSError:
        assert not (tmp_path / target).exists()
    else:
        assert not (tmp_path / target).is_symlink()
    assert victim.read_bytes() == b"mine"


def test_a_pipe_in_place_of_the_record_does_not_hang(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ckpt")
    os.mkfifo(tmp_path / ".out.bin.conversion")
    with pytest.raises(CheckpointError, match="out.bin.conversion is no regular file"):
        convert(tmp_path / "ckpt", tmp_path / "out.bin")


@pytest.mark.parametrize("files", ["no table", {"out.bin": "text"}, {"out.bin": {"embed.weight": "text"}}])
def test_a_record_that_no_conversion_wrote_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: object
) -> None:
    checkpoint(tmp_path / "ckpt")
    monkeypatch.setattr("zero_ckpt.conversion.pytorch_sink.checksum", lambda data: "the same")
    (tmp_path / ".out.bin.conversion").write_bytes(pack({"made_from": "the same", "files": files}))
    (tmp_path / "out.bin.partial").write_bytes(b"")
    convert(tmp_path / "ckpt", tmp_path / "out.bin")
    assert len(torch.load(tmp_path / "out.bin", weights_only=True)) > 3


@pytest.mark.parametrize("target", ["out.safetensors", "out.bin", "out"])
def test_no_workers_are_refused(tmp_path: Path, target: str) -> None:
    checkpoint(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="workers is 0, expected at least 1"):
        convert(tmp_path / "ckpt", tmp_path / target, workers=0)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_an_older_checkpoint_that_is_converted_into_a_root_does_not_become_its_latest(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ckpt")  # step 5
    save_sharded(tmp_path / "run", "mine", [], step=7)
    convert(tmp_path / "ckpt", tmp_path / "run", to="zero-ckpt")
    assert read_latest(tmp_path / "run") == "mine"
    save_sharded(tmp_path / "other", "mine", [], step=4)
    convert(tmp_path / "ckpt", tmp_path / "other", to="zero-ckpt")
    assert read_latest(tmp_path / "other") == "step5"
