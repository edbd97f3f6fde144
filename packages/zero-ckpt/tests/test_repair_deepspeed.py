"""A repair points `latest` at the newest whole checkpoint, also where DeepSpeed's are newer, or the only ones."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from test_save_deepspeed import save  # noqa: E402

from zero_ckpt import Interval, NotFoundError, open_any, save_sharded  # noqa: E402
from zero_ckpt.latest import read_latest  # noqa: E402
from zero_ckpt.repairing import repair  # noqa: E402


def save_theirs(root: Path, step: int) -> Path:
    """Save a checkpoint in DeepSpeed's format, as ``step``; leave no `latest`."""
    path = save(root / "made", 2, [["a"]], step=step, a=torch.ones(4) * step)
    folder = path.rename(root / path.name)
    (root / "made" / "latest").unlink()
    return folder


def spoil(folder: Path) -> None:
    """Flip a bit in a tensor of the optimizer's file, whose values are 7."""
    path = next(folder.glob("*_optim_states.pt"))
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<4f", *[7.0] * 4))] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("latest", (None, "gone", "global_step7"))
def test_latest_is_pointed_at_the_newest_whole_one_of_deepspeed(latest: str | None, tmp_path: Path) -> None:
    for step in (9, 10, 7):
        folder = save_theirs(tmp_path, step)
    spoil(folder)
    (tmp_path / "global_step11").mkdir()
    (tmp_path / "global_step11" / "mp_rank_00_model_states.pt").write_bytes(b"")
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    assert repair(tmp_path, dry_run=True) == ["would point latest at the newest whole checkpoint"]
    assert repair(tmp_path) == ["pointed latest at global_step10"]
    assert read_latest(tmp_path) == "global_step10" and open_any(tmp_path).step == 10
    assert repair(tmp_path) == [] == repair(tmp_path, dry_run=True)


def test_the_newer_of_both_formats_counts(tmp_path: Path) -> None:
    save_theirs(tmp_path, 7)
    for step, expected in ((5, "global_step7"), (8, "own8")):
        save_sharded(tmp_path, f"own{step}", [Interval("w", "param", (4,), "U8", 0, b"data")], step=step)
        (tmp_path / "latest").unlink()
        assert repair(tmp_path) == [f"pointed latest at {expected}"]


def test_without_a_whole_checkpoint_latest_stays(tmp_path: Path) -> None:
    spoil(save_theirs(tmp_path, 7))
    assert repair(tmp_path) == [] and read_latest(tmp_path) is None
    with pytest.raises(NotFoundError, match="holds no checkpoint"):
        repair(tmp_path / "made")
