"""Folders that are not ours: a save replaces none of them, a repair renames none, and none of them hides a root."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_ckpt import CheckpointError, Interval, NotFoundError, open_checkpoint, save_sharded, verify
from zero_ckpt.cli import main
from zero_ckpt.repairing import repair

MANIFEST = "manifest.msgpack"


def save(root: Path, step: int, tag: str | None = None) -> Path:
    return save_sharded(root, tag or f"s{step}", [Interval("w", "param", (4,), "U8", 0, b"data")], step=step)


def foreign_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b"\x81\xa4kind\xa5theirs")
    (folder / "notes.txt").write_text("mine")


def only_a_foreign_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_bytes(b"")


def no_regular_manifest(folder: Path) -> None:
    (folder / MANIFEST).mkdir()
    (folder / "notes.txt").write_text("mine")


def dangling_manifest(folder: Path) -> None:
    (folder / MANIFEST).symlink_to("nowhere")


def notes_beside_a_rank_file(folder: Path) -> None:
    (folder / "rank-00000.safetensors").write_bytes(b"theirs")
    (folder / "notes.txt").write_text("mine")


def deepspeed(folder: Path) -> None:
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"theirs")
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"theirs")


def distributed(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"theirs")
    (folder / "__0_0.distcp").write_bytes(b"theirs")


def hugging_face(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"theirs")


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


FOREIGN = [
    *(foreign_manifest, only_a_foreign_manifest, no_regular_manifest, dangling_manifest, notes_beside_a_rank_file),
    *(deepspeed, distributed, hugging_face),
]


@pytest.mark.parametrize("make", FOREIGN)
def test_a_foreign_folder_under_the_tag_is_not_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "global_step10"
    folder.mkdir()
    make(folder)
    before = contents(folder)
    with pytest.raises(CheckpointError, match="global_step10 exists and is no checkpoint, so it is not replaced"):
        save(tmp_path, 10, "global_step10")
    assert contents(folder) == before and sorted(path.name for path in tmp_path.glob(".*")) == []
    assert open_checkpoint(tmp_path).step == 1


@pytest.mark.parametrize("make", [make for make in FOREIGN if make is not notes_beside_a_rank_file])
def test_a_foreign_folder_is_neither_judged_nor_renamed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "notes"
    folder.mkdir()
    make(folder)
    before = contents(folder)
    assert repair(tmp_path) == [] and main(["verify", str(tmp_path)]) == 0
    assert contents(folder) == before


def test_a_foreign_manifest_in_a_root_hides_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / MANIFEST).write_bytes(b"\x81\xa4kind\xa5theirs")
    assert open_checkpoint(tmp_path).step == 1
    assert main(["verify", str(tmp_path)]) == 0


@pytest.mark.parametrize("damage", [b"", b"XCKPT\0\0\1"], ids=["empty", "mark"])
def test_a_checkpoint_whose_manifest_has_lost_its_mark_is_damaged_and_may_be_saved_again(
    tmp_path: Path, damage: bytes
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / MANIFEST).write_bytes(damage + (path / MANIFEST).read_bytes()[8:] if damage else b"")
    assert not verify(path).ok and main(["verify", str(tmp_path)]) == 1
    assert open_checkpoint(tmp_path).step == 1
    save(tmp_path, 2)
    assert verify(path).ok and open_checkpoint(tmp_path).step == 2


def test_a_folder_that_cannot_be_listed_hides_no_root_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run", 1)
    (tmp_path / "lost+found").mkdir()
    user = os.geteuid()
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755)
    (tmp_path / "lost+found").chmod(0)
    monkeypatch.chdir(tmp_path)
    os.seteuid(user or 65534)  # root reads everything
    try:
        with pytest.raises(NotFoundError, match="its folders run do; name one of them"):
            repair(".")
    finally:
        os.seteuid(user)
