"""`repair` and `verify` touch and judge what was written as a checkpoint, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_ckpt import CheckpointError, DamagedError, Interval, NotFoundError, convert, open_checkpoint, save_sharded
from zero_ckpt import verify as verify_one
from zero_ckpt.cli import main
from zero_ckpt.repairing import repair


def save(root: Path, step: int) -> Path:
    data = bytes([step]) * 4
    return save_sharded(root, f"s{step}", [Interval("w", "param", (4,), "U8", 0, data)], step=step)


def spoil(path: Path) -> None:
    data = path / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"!")


def tree(root: Path) -> list[tuple[str, bytes]]:
    return sorted(
        (str(path.relative_to(root)), path.read_bytes() if path.is_file() else b"") for path in root.rglob("*")
    )


def test_folders_of_the_user_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    assert main(["verify", str(tmp_path)]) == 0
    assert "notes" not in capsys.readouterr().out
    before = tree(tmp_path)
    assert repair(tmp_path) == [] and tree(tmp_path) == before
    with pytest.raises(CheckpointError, match="notes exists and is no checkpoint, so it is not replaced"):
        save_sharded(tmp_path, "notes", [], step=2)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("prefix", [".saving-", ".replaced-", ".deleting-"])
@pytest.mark.parametrize("rest", ["old", "s1", "s1.2024", ".0123456789ab", "s1.0123456789AB", "s1.0123456789abc"])
def test_folders_of_the_user_with_our_prefixes_are_left_alone(tmp_path: Path, prefix: str, rest: str) -> None:
    own = tmp_path / "run" / (prefix + rest)
    own.mkdir(parents=True)
    (own / "a.txt").write_text("mine")
    with pytest.raises(NotFoundError, match="holds no checkpoint"):
        repair(tmp_path / "run")
    save(tmp_path / "run", 1)
    before = tree(tmp_path)
    assert repair(tmp_path / "run", dry_run=True) == [] and repair(tmp_path / "run") == []
    assert tree(tmp_path) == before


@pytest.mark.parametrize("prefix", [".saving-", ".replaced-", ".deleting-"])
def test_a_folder_that_holds_folders_is_not_swept(
    tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    photos = tmp_path / f"{prefix}s1.0123456789ab" / "photos"
    photos.mkdir(parents=True)
    (photos / "a.jpg").write_bytes(b"mine")
    before = tree(tmp_path)
    assert repair(tmp_path, dry_run=True) == [] and repair(tmp_path) == [] and tree(tmp_path) == before
    assert f"left {photos.parent}: it holds folders" in caplog.text
    (photos / "a.jpg").unlink()
    photos.rmdir()
    assert repair(tmp_path) == [f"swept {photos.parent.name}"] and not photos.parent.exists()


def test_a_parent_of_roots_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "run1", 1)
    save(tmp_path / "run2", 1)
    (tmp_path / "notes").mkdir()
    before = tree(tmp_path)
    for command in ("repair", "verify"):
        assert main([command, str(tmp_path)]) == 2
        assert "its folders run1, run2 do; name one of them as the root" in capsys.readouterr().err
    with pytest.raises(NotFoundError, match="is a checkpoint itself; name the root"):
        repair(tmp_path / "run1" / "s1")
    assert tree(tmp_path) == before


def test_a_dry_run_changes_nothing_and_says_what_would_be_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    spoil(tmp_path / "s2")
    (tmp_path / ".saving-x.0123456789ab").mkdir()
    before = tree(tmp_path)
    assert main(["repair", "--dry-run", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "would restore s2 from other checkpoints, or set it aside" in text and "would sweep" in text
    assert "would point latest" in text and "nothing was changed" in text and tree(tmp_path) == before


def test_the_same_tag_is_set_aside_twice(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for _ in range(3):
        save(tmp_path, 2)
        spoil(tmp_path / "s2")
        assert repair(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".damaged"))
    assert names == [".damaged-s2", ".damaged-s2.2", ".damaged-s2.3"]


def test_swapped_and_renamed_folders_are_found_and_put_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "s1").rename(tmp_path / "x")
    (tmp_path / "s2").rename(tmp_path / "s1")
    (tmp_path / "x").rename(tmp_path / "s2")
    (tmp_path / "s3").rename(tmp_path / "best")
    with pytest.raises(DamagedError, match="holds the checkpoint that was saved as 's2'"):
        open_checkpoint(tmp_path, "s1")
    assert main(["verify", str(tmp_path)]) == 1
    capsys.readouterr()
    assert open_checkpoint(tmp_path / "best").step == 3  # by its own path it is what it is
    assert verify_one(tmp_path / "best").ok and verify_one(tmp_path / "best").saved_as == "s3"
    assert set(repair(tmp_path)) == {
        "renamed s1 to s2, as which it was saved",
        "renamed s2 to s1, as which it was saved",
        "renamed best to s3, as which it was saved",
    }
    assert [open_checkpoint(tmp_path, f"s{step}").step for step in (1, 2, 3)] == [1, 2, 3]
    assert main(["verify", str(tmp_path)]) == 0


def test_a_checkpoint_of_an_earlier_version_has_no_tag_and_is_believed(tmp_path: Path) -> None:
    import xxhash

    from zero_ckpt.manifest import MAGIC
    from zero_ckpt.plain import pack, unpack

    path = save(tmp_path, 1)
    table = unpack((path / "manifest.msgpack").read_bytes()[16:])
    assert table.pop("tag") == "s1"
    body = pack(table)
    (path / "manifest.msgpack").write_bytes(MAGIC + xxhash.xxh3_64_digest(body) + body)
    (tmp_path / "latest").write_text("renamed")
    path.rename(tmp_path / "renamed")
    assert open_checkpoint(tmp_path).read("w", "param") == b"\1" * 4 and main(["verify", str(tmp_path)]) == 0


@pytest.mark.parametrize("target", ["out.safetensors", "out", "zero-ckpt"])
def test_convert_overwrites_only_when_it_is_told_to(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run", 1)
    to = ["--to", "zero-ckpt"] if target == "zero-ckpt" else []
    command = ["convert", str(tmp_path / "run"), str(tmp_path / target), "--dtype", "keep", *to]
    assert main(command) == 0
    before = tree(tmp_path)
    assert main(command) == 2 and "exists and is not overwritten" in capsys.readouterr().err
    assert tree(tmp_path) == before
    assert main([*command, "--overwrite"]) == 0
    with pytest.raises(CheckpointError, match="is not overwritten"):
        convert(tmp_path / "run", tmp_path / target, to=to[-1] if to else None, dtype="keep")


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["", "overwrite"])
@pytest.mark.parametrize("to", ["safetensors", "pytorch", "zero-ckpt"])
@pytest.mark.parametrize("target", ["notes", "notes/out"])
def test_convert_names_a_file_where_a_folder_has_to_be(
    tmp_path: Path, to: str, target: str, overwrite: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if to == "pytorch":
        pytest.importorskip("torch")
    save(tmp_path / "run", 1)
    (tmp_path / "notes").write_text("mine")
    before = tree(tmp_path)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / target), "--to", to, *overwrite]) == 2
    assert f"{tmp_path / 'notes'} is no folder, and {tmp_path / target}" in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.parametrize("target", ["out.safetensors", "out.bin"])
def test_convert_names_a_folder_where_a_file_has_to_be(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if target == "out.bin":
        pytest.importorskip("torch")
    save(tmp_path / "run", 1)
    (tmp_path / target).mkdir()
    before = tree(tmp_path)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / target), "--overwrite"]) == 2
    assert f"{tmp_path / target} is a folder and is not overwritten" in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_convert_overwrites_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match="safetensors is a file of the checkpoint .*; name another target"):
        convert(tmp_path / "run", path / "rank-00000.safetensors", overwrite=True)
    assert verify_one(path).ok


def test_pytorch_and_universal_targets_are_not_overwritten(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import zero_ckpt

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    zero_ckpt.save(tmp_path / "run", {"model": model, "optimizer": optimizer}, step=1)
    for target, to in (("out.bin", "pytorch"), ("out", "deepspeed-universal")):
        convert(tmp_path / "run", tmp_path / target, to=to)
        before = tree(tmp_path)
        with pytest.raises(CheckpointError, match="exists and is not overwritten"):
            convert(tmp_path / "run", tmp_path / target, to=to)
        assert tree(tmp_path) == before
        convert(tmp_path / "run", tmp_path / target, to=to, overwrite=True)
