"""save and load are interchangeable with the safetensors package."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import zero_nvme_aio as aio
from zero_nvme_aio import errors
from zero_nvme_aio.testing import Fail, faulty_engine

TENSORS = {
    "weight": np.arange(70_007, dtype=np.float32).reshape(7, 10_001),
    "bias": np.arange(5, dtype=np.int64),
    "flags": np.array([True, False, True]),
    "scalar": np.array(3.5, dtype=np.float64),
    "empty": np.zeros((0, 4), dtype=np.float16),
    "bytes": np.arange(4099, dtype=np.uint8),
}


def test_what_is_saved_here_is_read_by_safetensors(tmp_path: Path) -> None:
    aio.save(tmp_path / "f", TENSORS, metadata={"format": "pt"})
    for name, array in load_file(tmp_path / "f").items():
        np.testing.assert_array_equal(array, TENSORS[name])
    with safe_open(tmp_path / "f", framework="np") as file:
        assert set(file.keys()) == set(TENSORS)
        assert file.metadata() == {"format": "pt"}


def test_what_safetensors_saved_is_read_here(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "f", metadata={"a": "b"})
    found = aio.load(tmp_path / "f", framework="numpy")
    assert set(found) == set(TENSORS)
    for name, array in found.items():
        assert (array.dtype, array.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
        np.testing.assert_array_equal(array, TENSORS[name])


def test_one_tensor_comes_back_as_itself(tmp_path: Path) -> None:
    aio.save(tmp_path / "f", TENSORS["weight"])
    np.testing.assert_array_equal(aio.load(tmp_path / "f", framework="numpy"), TENSORS["weight"])
    assert set(load_file(tmp_path / "f")) == {"tensor"}


def test_loaded_tensors_outlive_engine_and_file_and_may_be_written(tmp_path: Path) -> None:
    aio.save(tmp_path / "f", {"a": np.ones(1000, np.float32)})
    array = aio.load(tmp_path / "f", framework="numpy")["a"]
    os.unlink(tmp_path / "f")
    array += 1
    assert array.sum() == 2000


def test_only_the_names_asked_for_are_read(tmp_path: Path) -> None:
    aio.save(tmp_path / "f", TENSORS)
    found = aio.load(tmp_path / "f", ["bytes", "bias"], framework="numpy")
    assert set(found) == {"bytes", "bias"}
    np.testing.assert_array_equal(found["bytes"], TENSORS["bytes"])
    with pytest.raises(KeyError, match="'nope'"):
        aio.load(tmp_path / "f", ["nope"])


def test_destinations_are_filled_in_place_and_must_fit(tmp_path: Path) -> None:
    aio.save(tmp_path / "f", TENSORS)
    out = np.zeros(5, dtype=np.int64)
    assert aio.load(tmp_path / "f", out={"bias": out})["bias"] is out
    np.testing.assert_array_equal(out, TENSORS["bias"])
    with pytest.raises(errors.InvalidBufferError, match="40 bytes"):
        aio.load(tmp_path / "f", out={"bias": np.zeros(6, dtype=np.int64)})


def test_torch_tensors_of_every_dtype_survive(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.bool,
        torch.complex64,
    ]
    tensors = {str(d): torch.randint(0, 2, (33, 5)).to(d) for d in dtypes} | {"empty": torch.empty(0, 3)}
    aio.save(tmp_path / "f", tensors)
    from safetensors.torch import load_file as torch_load

    for found in (aio.load(tmp_path / "f"), torch_load(tmp_path / "f")):
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].to(torch.complex64), tensor.to(torch.complex64))


def test_without_a_framework_bytes_come_back(tmp_path: Path) -> None:
    aio.save(tmp_path / "f", {"x": b"hello"})
    assert bytes(aio.load(tmp_path / "f", framework="memoryview")["x"]) == b"hello"


def test_the_file_is_complete_or_not_there(tmp_path: Path) -> None:
    aio.save(tmp_path / "f", {"x": b"old"})
    with faulty_engine(Fail(on=("write",))) as io, pytest.raises(errors.DeviceError):
        aio.save(tmp_path / "f", {"x": b"new" * 10_000}, engine=io)
    with faulty_engine(Fail(on=("sync",))) as io, pytest.raises(errors.DeviceError):
        aio.save(tmp_path / "f", {"x": b"new"}, engine=io)
    assert bytes(aio.load(tmp_path / "f", framework="memoryview")["x"]) == b"old"
    assert os.listdir(tmp_path) == ["f"]


def _header(table: object, data: bytes = b"") -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


BROKEN = {
    "empty file": b"",
    "length beyond the file": struct.pack("<Q", 1 << 40) + b"{}",
    "not JSON": struct.pack("<Q", 4) + b"\xff\xff{}",
    "not an object": _header([1]),
    "nesting": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "unknown dtype": _header({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
    "negative": _header({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"1"),
    "wrong size": _header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
    "hole": _header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"12"),
    "trailing bytes": _header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"12"),
    "cut short": _header({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, b"12"),
    "overlap": _header({n: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for n in "ab"}, b"12"),
    "metadata": _header({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_a_format_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "f").write_bytes(BROKEN[name])
    with pytest.raises(errors.FormatError, match="f'"):
        aio.load(tmp_path / "f", framework="memoryview")


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_shape_whose_sizes_overflow_is_a_format_error(tmp_path: Path, framework: str) -> None:
    pytest.importorskip(framework)
    (tmp_path / "f").write_bytes(_header({"a": {"dtype": "U8", "shape": [2**61, 2**61, 0], "data_offsets": [0, 0]}}))
    with pytest.raises(errors.FormatError, match="tensor 'a' cannot be made of its bytes"):
        aio.load(tmp_path / "f", framework=framework)


def test_strided_and_foreign_things_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidBufferError, match="'w'"):
        aio.save(tmp_path / "f", {"w": TENSORS["weight"].T})
    with pytest.raises(errors.InvalidBufferError, match="'w'"):
        aio.save(tmp_path / "f", {"w": 3})
    with pytest.raises(errors.InvalidBufferError, match="'w'"):
        aio.save(tmp_path / "f", {"w": np.zeros(3, dtype="datetime64[s]")})
    assert os.listdir(tmp_path) == []
