"""Files that are read from disk, as targets of fuzzing: manifests, headers, indexes, configurations, hostfiles.

A target makes its seeds from real files. `check` takes any bytes: they are refused by the reader's own error, or read,
and what was read is true.
"""

from __future__ import annotations

import copy
import json
import runpy
from pathlib import Path
from typing import Any

import xxhash
from fuzz_mutations import JSON, Form, json_bytes

import zero_ckpt.plain
import zero_ckpt.safetensors_file
from zero_ckpt import CheckpointError, FileExtent, Interval, open_checkpoint, save_sharded, verify
from zero_ckpt.inspecting import describe
from zero_ckpt.manifest import MAGIC, decode_manifest
from zero_launch.hostfile import Hostfile
from zero_nvme_aio import ExtentStore, _header, errors
from zero_nvme_aio.extents._index import read_index
from zero_settings import Config, ConfigError, known_keys

SAMPLES = Path(__file__).parent.parent / "packages" / "zero-settings" / "tests" / "samples.py"


def plain_bytes(value: Any) -> bytes:
    """Return the msgpack of a value; raises ValueError for what it cannot hold."""
    try:
        return zero_ckpt.plain.pack(value)
    except (CheckpointError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


def plain_value(body: bytes) -> Any:
    """Return the value of msgpack; raises ValueError for what is none."""
    try:
        return zero_ckpt.plain.unpack(body)
    except CheckpointError as error:
        raise ValueError(str(error)) from error


class Manifests:
    """The manifest of a checkpoint of two written tensors and a linked one, with the checksum that goes with it."""

    form = Form(
        (
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\x91" * 5000,
            b"\xd6\xff\0\0\0\1",
        ),
        plain_value,
        plain_bytes,
    )

    def __init__(self, folder: Path) -> None:
        store = folder / "g.extents"
        store.write_bytes(b"linked" * 1000)
        tensors = [Interval(name, "param", (6,), "U8", 0, b"abcdef") for name in ("v", "w")]
        tensors += [Interval("linked", "exp_avg", (3, 4), "U8", 0, FileExtent(store, 4098, 12))]
        extras = {"client_state": {"a": [1, 2.5, None]}, "aliases": {"x": "w"}, "frozen": ["v"]}
        self.path = save_sharded(folder / "run", "t", tensors, step=1, rank_state=[b"r"], **extras)  # type: ignore[arg-type]
        self.file = self.path / "manifest.msgpack"
        self.body = self.file.read_bytes()[len(MAGIC) + 8 :]
        self.others = sorted(folder.iterdir())

    def seeds(self) -> list[bytes]:
        return [self.body]

    def check(self, data: bytes) -> bool:
        """Decode the manifest; if that works, verify, open, describe and read the checkpoint that has it."""
        raw = MAGIC + xxhash.xxh3_64_digest(data) + data
        try:
            decode_manifest(raw, "manifest")
        except CheckpointError as error:
            assert len(str(error)) < 10_000 + 8 * len(data)
            return False
        self.file.write_bytes(raw)
        verify(self.path, threads=1)
        try:
            opened = open_checkpoint(self.path)
            describe(opened)
            for name, kind in opened.tensors:
                opened.read(name, kind)
        except CheckpointError:
            return False
        assert sorted(self.path.parent.parent.iterdir()) == self.others
        return True


class Headers:
    """The header of a safetensors file, by the readers of zero-ckpt and of zero-nvme-aio."""

    form = JSON
    nbytes = 6 * 8 + 4 * 4

    def __init__(self, folder: Path) -> None:
        entries = [_header.TensorInfo("a", "F64", (2, 3), 0, 48), _header.TensorInfo("b", "F32", (4,), 48, 64)]
        texts = [("t0", "F32", (2, 2)), ("t1", "U8", (0,)), ("t2", "BF16", (24,))]
        encoded = zero_ckpt.safetensors_file.encode_header(texts, {"format": "pt"})[0]
        self.headers = [_header.build(entries, {"format": "pt"})[8:].rstrip(), encoded[8:].rstrip()]

    def seeds(self) -> list[bytes]:
        return self.headers

    def check(self, data: bytes) -> bool:
        """Read the header twice; entries lie inside of the file, and no two of them share a byte."""
        return self._checkpoint(data) | self._aio(data)

    def _checkpoint(self, data: bytes) -> bool:
        end = 8 + len(data)
        size = end + self.nbytes
        try:
            entries, _ = zero_ckpt.safetensors_file.parse_header(bytes(8) + data, size, "file")
        except CheckpointError:
            return False
        for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
            assert entry.begin == entry.end or entry.begin >= end
            assert entry.end <= size
            end = max(end, entry.end)
        return True

    def _aio(self, data: bytes) -> bool:
        try:
            entries, _ = _header.parse("file", data, self.nbytes)
        except errors.FormatError as error:
            assert len(str(error)) < 4000
            return False
        position = 0
        for entry in entries:
            assert entry.begin == position <= entry.end <= self.nbytes and entry.name.encode() is not None
            position = entry.end
        return True


class Extents:
    """The index of a sealed extent store, with the checksum that goes with it."""

    form = JSON

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with ExtentStore(folder, prefix="s") as store:
            for name in ("v", "w"):
                store.declare(name, 5000)
                store.write(name, bytes(5000))
            store.seal()
        (self.path,) = folder.glob("*.index")
        self.body = self.path.read_bytes().partition(b"\n")[2]
        self.count = 0

    def seeds(self) -> list[bytes]:
        return [self.body]

    def check(self, data: bytes) -> bool:
        """Read the index; pieces lie inside of their files, and the store opens by it or is refused."""
        self.path.write_bytes(f"xxh3_64:{xxhash.xxh3_64_hexdigest(data)}\n".encode() + data)
        try:
            sealed = read_index(str(self.path))
        except errors.FormatError as error:
            assert len(str(error)) < 2000
            return False
        for piece in sealed.pieces:
            assert piece.file_offset + piece.nbytes <= sealed.files[piece.stripe][1]
        self.count += 1
        if self.count % 500 == 1:  # an engine is started for it
            self._reopen()
        return True

    def _reopen(self) -> None:
        try:
            with ExtentStore(self.folder, prefix="s", resume=True) as store:
                for name, extents in store.extents().items():
                    out = bytearray(extents[-1].offset_bytes + extents[-1].nbytes)
                    if len(out) < 1 << 20:
                        store.read(name, out, verify=True).wait()
        except errors.AioError:
            return


class Configurations:
    """A configuration file, and the mapping in it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "config.json"
        self.count = 0
        self.samples: dict[str, Any] = runpy.run_path(str(SAMPLES))["SAMPLES"]
        sections = ("", "zero_optimization", "optimizer", "fp16", "checkpoint")
        keys = {f'"{key}":1,'.encode() for section in sections for key in known_keys(section)}
        self.form = Form((*JSON.words, *sorted(keys)), json.loads, json_bytes)

    def seeds(self) -> list[bytes]:
        return [json_bytes(sample) for sample in self.samples.values()]

    def check(self, data: bytes) -> bool:
        """Load the file; of every eighth that loads the mapping too, and what both say is in force loads again."""
        self.file.write_bytes(data)
        self.count += 1
        again = self.count % 8 == 0
        loaded = self._load(self.file, again)
        assert not (loaded and again) or self._load(json.loads(data), again)
        return loaded

    def _load(self, source: Any, again: bool) -> bool:
        try:
            config = Config.load(source, world_size=2, model_hint=64)
        except ConfigError as error:
            assert len(str(error)) < 100_000
            return False
        if not again:
            return True
        plain = config.to_plain()
        assert Config.load(copy.deepcopy(plain), world_size=2).to_plain() == plain
        return True


class Hostfiles:
    """A hostfile and, behind a line `--`, a filter over its hosts."""

    names = ("a", "b", "host-1", "user@host", "-oProxyCommand=x", "a b", "é", "x" * 300, "[::1]", "fe80::1%eth0")
    slots = ("1", "8", "0", "-1", "٣", "99999999999", "1.5", "", "9" * 5000, "0x10", "65537", "65536")
    form = Form(
        (
            *(f"{name} slots=2\n".encode() for name in names),
            *(f"slots={slots}".encode() for slots in slots),
            *(b"\n--\n", b"#", b"\x00", b"\r", b"\x85", b"\t", b"a@b", b"a:0,1", b"b:1-3@a", b"\xed\xa0\x80"),
        )
    )

    def __init__(self, folder: Path) -> None:
        self.texts = ["a slots=2\nb slots=4\n--\na:0,1@b", "# nodes\nuser@host-1 slots=8\r\n[::1] slots=1 # x\n--\nb"]

    def seeds(self) -> list[bytes]:
        return [text.encode() for text in self.texts]

    def check(self, data: bytes) -> bool:
        """Read the hostfile and choose hosts of it: never none, never more than there are."""
        text, _, words = data.decode(errors="surrogateescape").rpartition("\n--\n")
        try:
            hostfile = Hostfile.parse(text)
        except ValueError as error:
            assert len(str(error)) < 4000
            return False
        assert all(name[0] != "-" and " " not in name for name in hostfile.hosts)
        for choice in ({"include": words}, {"exclude": words}):
            try:
                assert 0 < hostfile.select(**choice).world_size <= hostfile.world_size
            except ValueError:
                continue
        return True
