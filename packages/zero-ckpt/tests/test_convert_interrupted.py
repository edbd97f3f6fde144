"""An interrupted conversion resumes where it stopped, and never resumes another one's files."""

from __future__ import annotations

import fcntl
import os
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from converted import Counting, blocks, checkpoint  # noqa: E402

import zero_ckpt  # noqa: E402
from zero_ckpt import CheckpointError, convert  # noqa: E402
from zero_ckpt.conversion import open_source  # noqa: E402
from zero_ckpt.conversion.partial_file import PartialFile  # noqa: E402


def test_an_interrupted_conversion_goes_on_where_it_stopped(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ckpt")
    first = convert(tmp_path / "ckpt", tmp_path / "out", max_shard_size="500")
    kept, redone = first[0].stat().st_ino, first[1].stat().st_ino
    first[1].rename(first[1].with_name(first[1].name + ".partial"))
    second = convert(tmp_path / "ckpt", tmp_path / "out", max_shard_size="500")
    assert second[0].stat().st_ino == kept and second[1].exists()
    checkpoint(tmp_path / "ckpt")  # another checkpoint with the same shapes is not mistaken for it
    with pytest.raises(CheckpointError, match=r"model-00001-of-.* exists and is not overwritten"):
        convert(tmp_path / "ckpt", tmp_path / "out", max_shard_size="500")
    third = convert(tmp_path / "ckpt", tmp_path / "out", max_shard_size="500", overwrite=True)
    assert third[0].stat().st_ino not in (kept, redone)


def test_an_interrupted_file_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_ckpt.conversion.sources.PIECE_BYTES", 1 << 14)
    monkeypatch.setattr("zero_ckpt.conversion.safetensors_sink.RECORD_BYTES", 1 << 15)
    target, partial = tmp_path / "out.safetensors", tmp_path / "out.safetensors.partial"
    model = torch.nn.Linear(1024, 256)
    zero_ckpt.save(tmp_path / "ckpt", {"model": model})
    with pytest.raises(KeyboardInterrupt):
        convert(Counting(open_source(tmp_path / "ckpt"), stop=50), target, workers=2)
    assert partial.exists() and not target.exists()
    with partial.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="is being written by another process"):
            convert(tmp_path / "ckpt", target)
    again = Counting(open_source(tmp_path / "ckpt"))
    convert(again, target, workers=2)
    assert 0 < again.reads < 65 and not partial.exists()
    assert torch.equal(safetensors.load_file(target)["weight"], model.weight)


def test_what_another_source_left_is_not_gone_on_with_and_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero_ckpt.conversion.sources.PIECE_BYTES", 1 << 14)
    monkeypatch.setattr("zero_ckpt.conversion.safetensors_sink.RECORD_BYTES", 1 << 15)
    target = tmp_path / "out.safetensors"
    zero_ckpt.save(tmp_path / "old", {"model": torch.nn.Linear(1024, 256)})
    with pytest.raises(KeyboardInterrupt):
        convert(Counting(open_source(tmp_path / "old"), stop=50), target, workers=2)
    model = torch.nn.Linear(1024, 256)
    zero_ckpt.save(tmp_path / "new", {"model": model})
    convert(tmp_path / "new", target)
    assert torch.equal(safetensors.load_file(target)["weight"], model.weight)
    for name in ("b.safetensors", "b.bin"):
        with pytest.raises(CheckpointError, match="no more"):
            convert(Counting(open_source(tmp_path / "new"), stop=50, error=CheckpointError("no more")), tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old", "out.safetensors"]


@pytest.mark.parametrize("shards", [None, "40KB"])
def test_an_interrupted_pytorch_file_goes_on_where_it_stopped(tmp_path: Path, shards: str | None) -> None:
    model = blocks(tmp_path)
    target = tmp_path / ("out.bin" if shards is None else "out")

    def run(source: Any) -> list[Path]:
        return convert(source, target, to="pytorch", max_shard_size=shards, workers=2)

    with pytest.raises(KeyboardInterrupt):
        run(Counting(open_source(tmp_path / "ckpt"), stop=6))
    left = [path.name for path in [*tmp_path.glob("*.partial"), *tmp_path.glob("out/*.partial")]]
    assert left == (["out.bin.partial"] if shards is None else ["pytorch_model-00003-of-00004.bin.partial"])
    again = Counting(open_source(tmp_path / "ckpt"))
    files = run(again)
    assert 0 < again.reads < 8
    loaded = {name: value for file in files for name, value in torch.load(file, weights_only=True).items()}
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    names = {path.name for path in tmp_path.iterdir()} | {path.name for path in tmp_path.glob("out/*")}
    assert not [name for name in names if name.startswith(".") or name.endswith(".partial")]
    for file in files:
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None


def test_a_killed_pytorch_model_goes_on_behind_the_shards_that_are_complete(tmp_path: Path) -> None:
    model = blocks(tmp_path)
    out = tmp_path / "out"

    class Killed(Counting):
        """A source whose process is killed at a read."""

        def read_into(self, *place: Any) -> None:
            if self.reads == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            super().read_into(*place)

    pid = os.fork()
    if pid == 0:
        convert(Killed(open_source(tmp_path / "ckpt")), out, to="pytorch", max_shard_size="40KB", workers=1)
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    complete = {path.name: path.stat().st_ino for path in out.glob("*.bin")}
    assert len(complete) == 2
    again = Counting(open_source(tmp_path / "ckpt"))
    files = convert(again, out, to="pytorch", max_shard_size="40KB", workers=1)
    assert again.reads == 4 and complete.items() <= {path.name: path.stat().st_ino for path in files}.items()
    loaded = {name: value for file in files for name, value in torch.load(file, weights_only=True).items()}
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_a_complete_shard_that_was_written_since_is_not_taken_for_it(tmp_path: Path) -> None:
    blocks(tmp_path)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(Counting(open_source(tmp_path / "ckpt"), stop=5), out, to="pytorch", max_shard_size="40KB", workers=1)
    first, *_ = sorted(out.glob("*.bin"))
    with first.open("r+b") as file:  # the same file still, of the same size
        file.write(b"overwritten")
    os.utime(first, ns=(0, 0))
    with pytest.raises(CheckpointError, match=f"{first.name} exists and is not overwritten"):
        convert(tmp_path / "ckpt", out, to="pytorch", max_shard_size="40KB")
    assert first.read_bytes().startswith(b"overwritten")


def test_an_interrupted_universal_checkpoint_goes_on_where_it_stopped(tmp_path: Path) -> None:
    blocks(tmp_path)
    (whole,) = convert(tmp_path / "ckpt", tmp_path / "whole", to="deepspeed-universal")
    first = Counting(open_source(tmp_path / "ckpt"), stop=15)
    with pytest.raises(KeyboardInterrupt):
        convert(first, tmp_path / "out", to="deepspeed-universal", workers=3)
    again = Counting(open_source(tmp_path / "ckpt"))
    (written,) = convert(again, tmp_path / "out", to="deepspeed-universal", workers=3)
    assert again.reads < 30
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []
    files = sorted(path.relative_to(whole) for path in whole.rglob("*.pt"))
    assert files == sorted(path.relative_to(written) for path in written.rglob("*.pt")) and len(files) > 20
    for file in files:
        expected, found = (torch.load(folder / file, weights_only=True) for folder in (whole, written))
        assert repr(expected) == repr(found), file


def test_two_conversions_to_one_target_do_not_mix(tmp_path: Path) -> None:
    blocks(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        convert(Counting(open_source(tmp_path / "ckpt"), stop=6), tmp_path / "out.bin", workers=1)
    with (tmp_path / ".out.bin.conversion").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="is being written by another process"):
            convert(tmp_path / "ckpt", tmp_path / "out.bin")
    blocks(tmp_path)  # another source: nothing of the first is kept
    again = Counting(open_source(tmp_path / "ckpt"))
    convert(again, tmp_path / "out.bin")
    assert again.reads == 8


def test_a_file_that_another_run_finishes_before_it_is_locked_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "out.safetensors", fcntl.flock
    first = PartialFile(path, 4, b"first")
    first.write(b"done", 0)

    def finish_before(fd: int, how: int) -> None:
        if not path.exists():
            monkeypatch.setattr("fcntl.flock", lock)
            first.finish(overwrite=False)
        lock(fd, how)

    monkeypatch.setattr("fcntl.flock", finish_before)
    second = PartialFile(path, 6, b"second")
    assert path.read_bytes() == b"done"
    second.write(b"second", 0)
    second.finish(overwrite=True)
    assert path.read_bytes() == b"second"
