"""A checkpoint that somebody made to hurt: nothing outside is touched, no memory beyond a bound, a named error."""

from __future__ import annotations

import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from zero_ckpt import CheckpointError, DamagedError, Interval, NotPlainDataError, open_checkpoint, save_sharded, verify
from zero_ckpt.checksum import checksum
from zero_ckpt.cli import main
from zero_ckpt.conversion import open_source
from zero_ckpt.latest import is_tag
from zero_ckpt.manifest import MAGIC
from zero_ckpt.plain import pack, unpack
from zero_ckpt.repairing import repair
from zero_ckpt.safetensors_file import encode_header, parse_header

DATA = b"abcdefgh" * 64
MEMORY = 900 << 20


def save(root: Path, step: int, **options: object) -> Path:
    return save_sharded(root, f"s{step}", [Interval("w", "param", (len(DATA),), "U8", 0, DATA)], step=step, **options)  # type: ignore[arg-type]


def seal(path: Path, body: bytes) -> None:
    (path / "manifest.msgpack").write_bytes(MAGIC + xxhash.xxh3_64_digest(body) + body)


def table(path: Path) -> dict[str, object]:
    return unpack((path / "manifest.msgpack").read_bytes()[16:])  # type: ignore[no-any-return]


def in_bounds(code: str, *arguments: object, memory: int = MEMORY) -> str:
    """Run Python code in a process of little memory; returns what it printed."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, preexec_fn=limit, timeout=100
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode()


VERIFY = "import sys, zero_ckpt; print(*zero_ckpt.verify(sys.argv[1]).problems)"
OPEN = """
import sys
from zero_ckpt.conversion import open_source
try:
    open_source(sys.argv[1])
except Exception as error:
    print(repr(error))
"""


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


def test_half_a_surrogate_pair_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    assert not is_tag("\ud800")
    with pytest.raises(CheckpointError, match="cannot be a tag"):
        save_sharded(tmp_path, "\ud800", [], step=1)
    with pytest.raises(NotPlainDataError, match=r"client_state\['a'\] is '\\ud800', which is not valid Unicode"):
        save(tmp_path, 1, client_state={"a": "\ud800"})
    with pytest.raises(CheckpointError, match="not valid Unicode"):
        save_sharded(tmp_path, "t", [Interval("\udfff", "param", (1,), "U8", 0, b"x")], step=1)


class TestForeign:
    """Files of torch and DeepSpeed."""

    torch = pytest.importorskip("torch")

    def deepspeed(self, folder: Path, name: str = "mp_rank_00_model_states.pt") -> Path:
        tag = folder / "global_step1"
        tag.mkdir(parents=True)
        (folder / "latest").write_text("global_step1")
        return tag / name

    def test_a_deflated_file_is_refused_before_it_is_inflated(self, tmp_path: Path) -> None:
        file = self.deepspeed(tmp_path)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            with archive.open("a/data.pkl", "w", force_zip64=True) as record:
                for _ in range(33):
                    record.write(bytes(10_000_000))
            archive.writestr("a/version", "3\n")
        with pytest.raises(CheckpointError, match=r"data.pkl' is compressed \(\d+ bytes that become 330000000\)"):
            open_source(tmp_path)

    @pytest.mark.parametrize("name", ["os\nsystem", "torch\nload", "torch.hub\nload", "builtins\neval"])
    def test_nothing_beyond_the_allowlist_is_resolved(self, tmp_path: Path, name: str) -> None:
        file = self.deepspeed(tmp_path)
        payload = b"c" + name.encode() + b"\n(S'touch " + str(tmp_path / "pwned").encode() + b"'\ntR."
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a/data.pkl", payload)
            archive.writestr("a/version", "3\n")
            archive.writestr("a/byteorder", "little")
        with pytest.raises(CheckpointError, match="holds objects that are not read"):
            open_source(tmp_path)
        (tmp_path / "dcp").mkdir()
        (tmp_path / "dcp" / ".metadata").write_bytes(payload)
        with pytest.raises(CheckpointError, match="is not allowed in checkpoint metadata"):
            open_source(tmp_path / "dcp")
        assert not (tmp_path / "pwned").exists()

    def test_no_attribute_of_torch_is_looked_up_to_judge_it(self, tmp_path: Path) -> None:
        (tmp_path / ".metadata").write_bytes(b"ctorch\n_inductor\n.")
        code = (
            "import sys, torch, zero_ckpt.conversion as c\n"
            "before = set(sys.modules)\n"
            "try:\n c.open_source(sys.argv[1])\n"
            "except c.CheckpointError as e:\n print(e)\n"
            "assert not [m for m in set(sys.modules) - before if m.startswith('torch._inductor')]"
        )
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=100)
        assert done.returncode == 0 and b"not allowed" in done.stdout, done.stderr

    @pytest.mark.parametrize(
        "metadata",
        [
            b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
            b"Nr\xff\xff\xff\x7f.",
            b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"a.",
            b"(" * 100_000 + b".",
            b"}" * 10 + b"u.",
            pickle.dumps({"no": "metadata"}),
        ],
        ids=["byte array", "memo", "text", "marks", "setitems", "other"],
    )
    def test_metadata_made_to_hurt_is_a_typed_error(self, tmp_path: Path, metadata: bytes) -> None:
        (tmp_path / ".metadata").write_bytes(metadata)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            open_source(tmp_path)

    @pytest.mark.parametrize("what", ["class", "function", "key", "keys of a call"])
    def test_metadata_changes_nothing_of_this_process_and_hashes_nothing_that_takes_for_ever(
        self, tmp_path: Path, what: str
    ) -> None:
        from torch.distributed.checkpoint.metadata import Metadata
        from torch.serialization import _get_layout

        attribute = pickle.dumps((None, {"is_symlink": 1, "__doc__": "changed"}), 2)[2:-1]
        if what.startswith("key"):
            pairs = b"".join(b"h%ch%c\x86q%c0" % (n, n, n + 1) for n in range(80))  # each of the one before, twice
            data = b"\x80\x02K\x01q\x000" + pairs
            data += b"}h\x50K\x01s." if what == "key" else b"cbuiltins\ndict\n](h\x50K\x01\x86e\x85R."
        else:
            name = b"cpathlib\nPath\n" if what == "class" else b"ctorch.serialization\n_get_layout\n"
            data = b"\x80\x04" + name + attribute + b"b."
        (tmp_path / ".metadata").write_bytes(data)
        before = Path.is_symlink, _get_layout.__doc__, Metadata.__doc__
        with pytest.raises(CheckpointError, match="is not allowed"):
            open_source(tmp_path)
        assert before == (Path.is_symlink, _get_layout.__doc__, Metadata.__doc__)

    def dcp(self, folder: Path, sizes: tuple[int, ...], shape: tuple[int, ...], path: str, length: int) -> None:
        from torch.distributed.checkpoint import metadata as m
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        chunk = m.ChunkStorageMetadata(self.torch.Size([0] * len(sizes)), self.torch.Size(sizes))
        properties = m.TensorProperties(self.torch.uint8)
        tensor = m.TensorStorageMetadata(properties, self.torch.Size(shape), [chunk])
        index = m.MetadataIndex("w", chunk.offsets, 0)
        stored = m.Metadata({"w": tensor}, None, {index: _StorageInfo(path, 0, length)})
        (folder / ".metadata").write_bytes(pickle.dumps(stored))

    def test_a_box_of_a_tensor_is_not_a_trillion_runs(self, tmp_path: Path) -> None:
        self.dcp(tmp_path, (1 << 40, 1), (1 << 40, 2), "a.distcp", 100)
        (tmp_path / "a.distcp").write_bytes(bytes(100))
        with pytest.raises(DamagedError, match="would be 1099511627776 runs of elements, expected at most"):
            open_source(tmp_path)

    @pytest.mark.parametrize("harm", ["pipe", "absent", "beyond", "directory of gigabytes"])
    def test_a_data_file_of_another_kind_is_a_typed_error(self, tmp_path: Path, harm: str) -> None:
        file = tmp_path / "a.distcp"
        nbytes = 6 << 30
        self.dcp(tmp_path, (4,), (4,), "a.distcp", nbytes if harm == "directory of gigabytes" else 100)
        if harm == "pipe":
            os.mkfifo(file)
        elif harm == "beyond":
            file.write_bytes(bytes(50))
        elif harm == "directory of gigabytes":
            with file.open("wb") as out:
                out.seek(nbytes - 22)
                out.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 3 << 30, 0, 0))
        if harm == "directory of gigabytes":
            assert "DamagedError" in in_bounds(OPEN, tmp_path, memory=4 << 30)
        with pytest.raises(DamagedError):
            open_source(tmp_path)

    def test_what_a_file_says_many_times_is_not_copied_many_times(self, tmp_path: Path) -> None:
        file = self.deepspeed(tmp_path)
        value: list[object] = [1]
        for _ in range(60):
            value = [value, value]
        self.torch.save({"module": {}, "mine": 3, "laughs": value}, file)
        assert open_source(tmp_path).client_state == {"mine": 3, "not_converted": ["laughs"]}

    @pytest.mark.parametrize(
        "value", [{}, {"module": 3}, {"module": {}, "param_shapes": 7}, {"module": {}, "global_steps": "x"}, [1]]
    )
    def test_a_file_of_another_layout_is_a_typed_error(self, tmp_path: Path, value: object) -> None:
        file = self.deepspeed(tmp_path)
        self.torch.save(value, file)
        with pytest.raises(CheckpointError):
            open_source(tmp_path)
        self.torch.save({"module": {}}, file)
        self.torch.save(value, file.with_name("zero_pp_rank_0_mp_rank_00_optim_states.pt"))
        with pytest.raises(CheckpointError):
            open_source(tmp_path)

    def test_a_file_of_before_torch_1_6_is_refused_by_name(self, tmp_path: Path) -> None:
        file = self.deepspeed(tmp_path)
        self.torch.save({"module": {}}, file, _use_new_zipfile_serialization=False)
        with pytest.raises(CheckpointError, match="is not in torch's zip format"):
            open_source(tmp_path)
