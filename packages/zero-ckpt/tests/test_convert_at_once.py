"""Two conversions to one target, or a target that appears meanwhile: nothing is overwritten that was not agreed to."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from converted import blocks, checkpoint  # noqa: E402

from zero_ckpt import CheckpointError, convert, open_checkpoint, save_sharded  # noqa: E402
from zero_ckpt.conversion import open_source, pytorch_sink  # noqa: E402
from zero_ckpt.conversion.record import RECORD_BYTES, ConversionRecord  # noqa: E402
from zero_ckpt.zero_to_fp32 import convert_zero_checkpoint_to_state_dict  # noqa: E402

DESCRIPTORS = Path("/proc/self/fd")
EXISTS = "exists and is not overwritten"


class Meanwhile:
    """A source that runs `action` once, in the first read of a tensor or look at its fingerprint (`at`)."""

    def __init__(self, source: Any, action: Callable[[], object], at: str = "read_into") -> None:
        self._source, self._action, self._at = source, action, at

    def __getattr__(self, name: str) -> Any:
        if name == self._at:
            self._at = ""
            self._action()
        return getattr(self._source, name)


@pytest.mark.parametrize("target", ["out.safetensors", "out.bin"])
def test_a_file_that_appears_during_a_conversion_stays(tmp_path: Path, target: str) -> None:
    checkpoint(tmp_path / "ckpt")
    path = tmp_path / target

    def run(**options: bool) -> None:
        convert(Meanwhile(open_source(tmp_path / "ckpt"), lambda: path.write_bytes(b"mine")), path, **options)

    with pytest.raises(CheckpointError, match=EXISTS):
        run()
    assert path.read_bytes() == b"mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt", target]
    run(overwrite=True)
    assert path.stat().st_size > 100


def test_a_conversion_that_ends_before_the_other_has_its_file_stays(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ckpt")
    path = tmp_path / "out.safetensors"
    later = Meanwhile(
        open_source(tmp_path / "ckpt"), lambda: convert(tmp_path / "ckpt", path, dtype="bf16"), "fingerprint"
    )
    with pytest.raises(CheckpointError, match=EXISTS):
        convert(later, path)
    assert {tensor.dtype for tensor in open_source(path).tensors.values()} == {"BF16", "I64"}


def test_a_checkpoint_that_appears_during_a_conversion_stays(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ckpt")
    root = tmp_path / "run"
    source = Meanwhile(
        open_source(tmp_path / "ckpt"), lambda: save_sharded(root, "step5", [], step=5, client_state="mine")
    )
    with pytest.raises(CheckpointError, match="exists"):
        convert(source, root, to="zero-ckpt")
    assert open_checkpoint(root, "step5").client_state == "mine"
    convert(tmp_path / "ckpt", root, to="zero-ckpt", overwrite=True)
    assert len(open_checkpoint(root, "step5").tensors) > 3


@pytest.mark.parametrize("to", ["safetensors", "pytorch"])
def test_the_index_of_a_model_in_other_files_stays(tmp_path: Path, to: str) -> None:
    checkpoint(tmp_path / "ckpt")
    out = tmp_path / "out"
    convert(tmp_path / "ckpt", out, to=to, max_shard_size="500")
    (index,) = out.glob("*.index.json")
    before, files = index.read_bytes(), sorted(out.iterdir())
    with pytest.raises(CheckpointError, match=rf"{index.name} {EXISTS}"):
        convert(tmp_path / "ckpt", out, to=to, max_shard_size="1KB")
    assert index.read_bytes() == before and sorted(out.iterdir()) == files
    convert(tmp_path / "ckpt", out, to=to, max_shard_size="1KB", overwrite=True)
    assert index.read_bytes() != before


def test_a_record_that_is_removed_before_it_is_locked_is_not_held_by_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / ".conversion", fcntl.flock
    first = ConversionRecord(path, "x")

    def close_before(fd: int, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock)
        first.close(keep=False)
        lock(fd, how)

    monkeypatch.setattr("fcntl.flock", close_before)
    second = ConversionRecord(path, "x")
    with pytest.raises(CheckpointError, match="is being written by another"):
        ConversionRecord(path, "x")
    second.close(keep=False)


def test_a_record_stays_locked_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lock = tmp_path / ".conversion", fcntl.flock
    first = ConversionRecord(path, "x")
    taken = []

    def rival(fd: int, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock)
        try:
            taken.append(ConversionRecord(path, "x"))
        except CheckpointError as error:
            assert "is being written by another" in str(error)
        finally:
            monkeypatch.setattr("fcntl.flock", rival)
        lock(fd, how)

    monkeypatch.setattr("fcntl.flock", rival)
    first.note("file", {"w": 1}, RECORD_BYTES)
    monkeypatch.setattr("fcntl.flock", lock)
    assert taken == []
    with pytest.raises(CheckpointError, match="is being written by another"):
        ConversionRecord(path, "x")
    first.close(keep=True)
    again = ConversionRecord(path, "x")
    assert again.done("file") == {"w": 1}
    again.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_a_universal_checkpoint_is_not_taken_apart_by_a_second_conversion(tmp_path: Path) -> None:
    blocks(tmp_path)
    out = tmp_path / "out"

    def rival() -> None:
        with pytest.raises(CheckpointError, match="is being written by another"):
            convert(tmp_path / "ckpt", out, to="deepspeed-universal")

    (written,) = convert(Meanwhile(open_source(tmp_path / "ckpt"), rival), out, to="deepspeed-universal")
    assert sorted(path.name for path in out.iterdir()) == ["global_step1", "latest_universal"]
    assert len(list(written.rglob("*.pt"))) > 20


RANK = """
import sys
from zero_ckpt.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

sys.stdin.readline()
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], max_shard_size="40KB")
"""


def test_all_ranks_of_a_script_may_ask_for_one_state_dict_at_once(tmp_path: Path) -> None:
    model = blocks(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", RANK, str(tmp_path / "ckpt"), str(out)]
    ranks = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, errors
    assert not [path for path in out.iterdir() if path.name.endswith(".turn")]
    loaded = {name: value for file in out.glob("*.bin") for name, value in torch.load(file, weights_only=True).items()}
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_who_waited_for_the_same_state_dict_does_not_write_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks(tmp_path)
    written: list[Path] = []
    write = pytorch_sink.write_pytorch

    def counted(source: Any, tensors: Any, target: Path, **options: Any) -> Any:
        written.append(target)
        return write(source, tensors, target, **options)

    monkeypatch.setattr(pytorch_sink, "write_pytorch", counted)
    out = tmp_path / "out"
    out.mkdir()
    turn = out / ".out.turn"
    with ThreadPoolExecutor(3) as pool:
        with turn.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            asked = ("float32", "float32", "bfloat16")
            ranks = [
                pool.submit(convert_zero_checkpoint_to_state_dict, tmp_path / "ckpt", out, dtype) for dtype in asked
            ]
            while sum(os.path.realpath(fd) == str(turn) for fd in DESCRIPTORS.iterdir()) < 4:
                assert not any(rank.done() for rank in ranks)
        for rank in ranks:
            rank.result()
    assert len(written) in (2, 3)  # 3 where the one that asked for bfloat16 came between the two
    convert_zero_checkpoint_to_state_dict(tmp_path / "ckpt", out)
    assert len(written) in (3, 4) and not turn.exists()
