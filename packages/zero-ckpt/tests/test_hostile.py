"""A checkpoint that somebody made to hurt: nothing outside is touched, no memory beyond a bound, a named error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from bounded import OPEN, VERIFY, in_bounds

from zero_ckpt import (
    CheckpointError,
    DamagedError,
    FileExtent,
    Interval,
    NotPlainDataError,
    open_checkpoint,
    save_sharded,
    verify,
)
from zero_ckpt.checksum import checksum
from zero_ckpt.cli import main
from zero_ckpt.conversion import open_source
from zero_ckpt.latest import is_tag
from zero_ckpt.manifest import MAGIC
from zero_ckpt.plain import pack, unpack
from zero_ckpt.repairing import repair
from zero_ckpt.safetensors_file import encode_header, parse_header

DATA = b"abcdefgh" * 64


def save(root: Path, step: int, **options: object) -> Path:
    return save_sharded(root, f"s{step}", [Interval("w", "param", (len(DATA),), "U8", 0, DATA)], step=step, **options)  # type: ignore[arg-type]


def seal(path: Path, body: bytes) -> None:
    (path / "manifest.msgpack").write_bytes(MAGIC + xxhash.xxh3_64_digest(body) + body)


def table(path: Path) -> dict[str, object]:
    return unpack((path / "manifest.msgpack").read_bytes()[16:])  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["data", "manifest", "folder"])
def test_no_link_below_a_root_is_followed(tmp_path: Path, what: str) -> None:
    save(tmp_path / "run", 1)
    victim = save(tmp_path / "run", 2)
    outside = tmp_path / "outside"
    name = {"data": "rank-00000.safetensors", "manifest": "manifest.msgpack", "folder": ""}[what]
    (victim / name).rename(outside)
    (victim / name).symlink_to(outside)
    with pytest.raises(DamagedError, match="symbolic link"):
        open_checkpoint(tmp_path / "run", "s2")
    assert open_checkpoint(tmp_path / "run").step == 1
    assert main(["verify", str(tmp_path / "run")]) == (0 if what == "folder" else 1)


def test_a_linked_file_below_a_folder_is_refused_too(tmp_path: Path) -> None:
    path = save(tmp_path / "run", 1)
    (tmp_path / "elsewhere").mkdir()
    (path / "rank-00000.safetensors").rename(tmp_path / "elsewhere" / "file")
    (path / "inner").symlink_to(tmp_path / "elsewhere")
    changed = table(path)
    changed["files"][0]["path"] = "inner/file"  # type: ignore[index]
    seal(path, pack(changed))
    assert not verify(path).ok
    with pytest.raises(CheckpointError):
        open_checkpoint(path).read("w", "param")


def test_repair_writes_nothing_outside_of_the_root(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    victim = save(tmp_path / "run", 2)
    outside = tmp_path / "authorized_keys"
    data = victim / "rank-00000.safetensors"
    bad = bytearray(data.read_bytes())
    bad[-len(DATA) :] = b"x" * len(DATA)
    outside.write_bytes(bad)
    data.unlink()
    data.symlink_to(outside)
    done = repair(tmp_path / "run")
    assert outside.read_bytes() == bad and any("set s2 aside" in line for line in done)


@pytest.mark.parametrize("linked", [False, True])
def test_repair_writes_through_no_hard_link(tmp_path: Path, linked: bool) -> None:
    payload, mine = b"payload".ljust(300, b"#"), b"mine".ljust(300, b"#")
    sealed, outside = tmp_path / "sealed", tmp_path / "outside"
    sealed.write_bytes(payload)
    save_sharded(tmp_path / "run", "s1", [Interval("w", "param", (300,), "U8", 0, payload)], step=1)
    data = FileExtent(sealed, 0, 300) if linked else payload
    path = save_sharded(tmp_path / "run", "s2", [Interval("w", "param", (300,), "U8", 0, data)], step=2)
    (file,) = path.glob("rank-*")
    before = file.read_bytes().replace(payload, mine)
    outside.write_bytes(before)
    outside.chmod(0o444)
    file.unlink()
    file.hardlink_to(outside)
    assert repair(tmp_path / "run") == ["restored damaged slices of s2 from other checkpoints"]
    assert outside.read_bytes() == before and verify(path).ok
    assert outside.stat().st_nlink == 1 and file.stat().st_mode == outside.stat().st_mode


def test_a_save_writes_through_no_link_that_lies_there(tmp_path: Path) -> None:
    root, outside = tmp_path / "run", tmp_path / "outside"
    root.mkdir()
    for name in ("latest", "zero_to_fp32.py"):
        (root / name).symlink_to(outside)
    save(root, 1)
    assert not outside.exists() and open_checkpoint(root).step == 1


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    data = path / "rank-00000.safetensors"
    data.unlink()
    os.mkfifo(data)
    assert "not a regular file" in str(verify(path).problems[0])
    with pytest.raises(DamagedError, match="not a regular file"):
        open_checkpoint(path)
    with pytest.raises(DamagedError):
        open_source(save_pipe(tmp_path))


def save_pipe(folder: Path) -> Path:
    (folder / "hf").mkdir()
    os.mkfifo(folder / "hf" / "model.safetensors")
    return folder / "hf"


def test_a_header_of_twelve_gigabytes_is_refused_by_its_size(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with (path / "rank-00000.safetensors").open("r+b") as file:
        file.truncate(12 << 30)
    changed = table(path)
    changed["files"][0].update(nbytes=12 << 30, header_nbytes=(12 << 30) - 4096)  # type: ignore[index]
    seal(path, pack(changed))
    assert "gives it a header of 12884897792 bytes, expected at most" in in_bounds(VERIFY, path)
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(((12 << 30) - 8).to_bytes(8, "little"))
        file.truncate(12 << 30)
    assert "not a safetensors file (header of 12884901880 bytes" in in_bounds(OPEN, tmp_path / "big.safetensors")


def test_a_slice_larger_than_memory_is_verified(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    size = 1 << 30
    header, nbytes = encode_header([("param/w@0", "U8", (size,))])
    with (path / "rank-00000.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(nbytes)
    changed = table(path)
    digest = checksum(header)
    changed["files"][0].update(nbytes=nbytes, header_nbytes=len(header), header_checksum=digest)  # type: ignore[index]
    changed["tensors"][0].update(shape=[size])  # type: ignore[index]
    changed["tensors"][0]["slices"][0].update(length=size, key="param/w@0")  # type: ignore[index]
    seal(path, pack(changed))
    assert "elements 0 to 1073741824 are damaged" in in_bounds(VERIFY, path)


MANY = 30 << 20
BOMBS = {
    "lists": b"\xdd" + MANY.to_bytes(4, "big") + b"\x90" * MANY,
    "nested lists": b"\xdd" + (MANY // 2).to_bytes(4, "big") + b"\x91\xc0" * (MANY // 2),
    "maps": b"\xdd" + MANY.to_bytes(4, "big") + b"\x80" * MANY,
    "one map": b"\xdf" + (MANY // 3).to_bytes(4, "big") + b"\xa1a\xc0" * (MANY // 3),
    "deep": b"\x91" * MANY + b"\xc0",
}


@pytest.mark.soak
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_manifest_of_thirty_megabytes_does_not_become_two_gigabytes(tmp_path: Path, bomb: str) -> None:
    path = save(tmp_path, 1)
    seal(path, BOMBS[bomb])
    assert "not valid msgpack" in in_bounds(VERIFY, path)


@pytest.mark.parametrize("bomb", [*BOMBS])
def test_lists_and_maps_beyond_a_budget_are_refused_while_they_are_read(
    bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero_ckpt.plain._OBJECT_BYTES", 1 << 20)
    monkeypatch.setattr("zero_ckpt.plain._OBJECT_BYTES_PER_BYTE", 0)
    with pytest.raises(DamagedError, match="not valid msgpack"):
        unpack(BOMBS[bomb])
    assert unpack(pack([[1, 2]] * 1000)) == [[1, 2]] * 1000


def test_a_manifest_beyond_the_bound_is_not_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with (path / "manifest.msgpack").open("r+b") as file:
        file.truncate(12 << 30)
    assert "12884901888 bytes, expected at most 536870912" in in_bounds(VERIFY, path)


def test_what_no_reader_would_take_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_ckpt.manifest._ALWAYS_READABLE_BYTES", 1 << 16)
    monkeypatch.setattr("zero_ckpt.plain._OBJECT_BYTES", 1 << 20)
    with pytest.raises(CheckpointError, match="the manifest would not be readable: .*keep large data out of client_st"):
        save(tmp_path, 1, client_state=[[]] * (1 << 17))
    assert not (tmp_path / "s1").exists()
    save(tmp_path, 2, client_state=[list(range(1 << 16)), {"a": [[1, 2]] * (1 << 13)}])
    assert open_checkpoint(tmp_path).step == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.replace(b"\xaaworld_size", b"\xa4step"), "has the key 'step' twice"),
        (lambda body: body.replace(b"\xa1!", b"\xd6\xff\0\0\0\1"), "Timestamp is not plain data"),
        (lambda body: body.replace(b"\xa1!", b"\xd4\x05\0"), "unknown extension type 5"),
        (
            lambda body: body.replace(b"\xa9zero-ckpt", b"\xc8\x08\0\1" + bytes([1]) * 2048),
            "an integer of 2048 bytes, expected at most 1000",
        ),
        (lambda body: body.replace(b"\xa1!", b"\xa3\xed\xa0\x80"), "UnicodeDecodeError"),
    ],
)
def test_what_plain_data_does_not_hold_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = save(tmp_path, 1, client_state="!")
    body = (path / "manifest.msgpack").read_bytes()[16:]
    assert change(body) != body
    seal(path, change(body))
    with pytest.raises(DamagedError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{}}', "the key 'a' appears twice"),
        (
            '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
            "entries 'a' and 'b' overlap",
        ),
        ('{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "not valid Unicode"),
        ('{"__metadata__":{"a":"\\udfff"}}', "not valid Unicode"),
        ("[" + "[]," * 30_000_000 + "[]]", "too many values for its"),
        ('{"a":{"shape":[' + "1," * 40_000_000 + "1]}}", "too many values for its"),
    ],
    ids=["twice", "overlap", "surrogate", "metadata", "lists", "numbers"],
)
def test_headers_that_readers_disagree_about_are_refused(text: str, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        parse_header(bytes(8) + text.encode(), 1 << 20, "file")


def test_two_slices_are_not_the_same_bytes(tmp_path: Path) -> None:
    parts = [Interval(name, "param", (4,), "U8", 0, b"same") for name in ("v", "w")]
    path = save_sharded(tmp_path, "t", parts, step=1)
    changed = table(path)
    changed["tensors"][1]["slices"] = changed["tensors"][0]["slices"]  # type: ignore[index]
    seal(path, pack(changed))
    with pytest.raises(DamagedError, match=r"'w' \(param\): entry 'param/v@0' of .* is given to two slices"):
        open_checkpoint(path)


def test_an_integer_that_python_would_not_print_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(NotPlainDataError, match="an integer of 2077 bytes, expected at most 1000"):
        save(tmp_path, 1, client_state=[10**5000])
    assert open_checkpoint(save(tmp_path, 1, client_state=[10**2000])).client_state == [10**2000]


def test_half_a_surrogate_pair_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    assert not is_tag("\ud800")
    with pytest.raises(CheckpointError, match="cannot be a tag"):
        save_sharded(tmp_path, "\ud800", [], step=1)
    with pytest.raises(NotPlainDataError, match=r"client_state\['a'\] is '\\ud800', which is not valid Unicode"):
        save(tmp_path, 1, client_state={"a": "\ud800"})
    with pytest.raises(CheckpointError, match="not valid Unicode"):
        save_sharded(tmp_path, "t", [Interval("\udfff", "param", (1,), "U8", 0, b"x")], step=1)


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"a":{"dtype":"F32","shape":[' + "9" * 10_000 + "]}}", "[]", "1"])
def test_headers_built_to_hurt_are_refused(text: str) -> None:
    with pytest.raises(DamagedError, match="safetensors header|no valid shape"):
        parse_header(bytes(8) + text.encode(), 1 << 20, "file")
