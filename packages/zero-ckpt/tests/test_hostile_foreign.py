"""Files of torch and DeepSpeed that somebody made to hurt."""

from __future__ import annotations

import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from bounded import OPEN_BESIDE_TORCH, in_bounds

from zero_ckpt import CheckpointError, DamagedError
from zero_ckpt.conversion import open_source


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
            "import sys, torch.distributed.checkpoint, zero_ckpt.conversion as c\n"
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
            assert "DamagedError" in in_bounds(OPEN_BESIDE_TORCH, tmp_path, memory=resource.RLIM_INFINITY)
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
