"""What is saved by any number of ranks is read back by any other, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from ranks import ThreadCoordinator, on_ranks

from zero_ckpt import (
    CheckpointError,
    Interval,
    MismatchError,
    NotFoundError,
    NotPlainDataError,
    ReadRequest,
    open_checkpoint,
    opened,
    reader,
    save_sharded,
)
from zero_ckpt.opened import read_fd
from zero_ckpt.plan import MAX_SLICE_BYTES
from zero_ckpt.types import ITEMSIZE, numel

TENSORS = {
    ("embed.weight", "param"): ((301, 17), "BF16"),
    ("embed.weight", "master"): ((301, 17), "F32"),
    ("embed.weight", "exp_avg"): ((301, 17), "F64"),
    ("norm.bias", "param"): ((13,), "F8_E4M3"),
    ("count", "buffer"): ((), "I64"),
    ("nothing", "param"): ((0, 5), "F32"),
    ("mask", "buffer"): ((7, 3), "BOOL"),
}


def contents(rng: random.Random) -> dict[tuple[str, str], bytes]:
    return {key: rng.randbytes(numel(shape) * ITEMSIZE[dtype]) for key, (shape, dtype) in TENSORS.items()}


def shard(data: dict[tuple[str, str], bytes], rank: int, world_size: int) -> list[Interval]:
    """An even split of each flat tensor; the last rank has what is left."""
    found = []
    for (name, kind), raw in data.items():
        shape, dtype = TENSORS[name, kind]
        size, total = ITEMSIZE[dtype], numel(shape)
        begin, end = total * rank // world_size, total * (rank + 1) // world_size
        found.append(Interval(name, kind, shape, dtype, begin, raw[begin * size : end * size]))
    return found


@pytest.mark.parametrize("saved_by", [1, 2, 3, 4])
@pytest.mark.parametrize("read_by", [1, 2, 3, 4])
def test_any_world_size_reads_what_any_other_saved(
    tmp_path: Path, rng: random.Random, saved_by: int, read_by: int
) -> None:
    data = contents(rng)

    def save(group: ThreadCoordinator) -> Path:
        return save_sharded(
            tmp_path, "step1", shard(data, group.rank, saved_by), step=1, coordinator=group, rank_state=[group.rank]
        )

    assert on_ranks(saved_by, save) == [tmp_path / "step1"] * saved_by

    def read(group: ThreadCoordinator) -> None:
        checkpoint = open_checkpoint(tmp_path, coordinator=group)
        assert (checkpoint.step, checkpoint.world_size) == (1, saved_by)
        assert list(checkpoint.rank_state) == [[rank] for rank in range(saved_by)]
        for wanted in shard(data, group.rank, read_by):
            out = bytearray(len(wanted.data))  # type: ignore[arg-type]
            checkpoint.read_into(wanted.name, wanted.kind, wanted.offset, out)
            assert out == wanted.data

    assert on_ranks(read_by, read) == [None] * read_by


def test_replicas_are_written_once_and_balanced(tmp_path: Path, rng: random.Random) -> None:
    raw = rng.randbytes(5 * MAX_SLICE_BYTES + 40)

    def save(group: ThreadCoordinator) -> Path:
        return save_sharded(
            tmp_path, "t", [Interval("w", "param", (len(raw),), "U8", 0, raw)], step=0, coordinator=group
        )

    on_ranks(3, save)
    checkpoint = open_checkpoint(tmp_path, "t")
    sizes = [entry.nbytes for entry in checkpoint.manifest.files]
    assert len(sizes) == 3 and sum(sizes) < len(raw) + 3 * 8192
    assert max(sizes) - min(sizes) <= MAX_SLICE_BYTES
    assert checkpoint.read("w", "param") == raw


def test_a_slice_is_bounded_so_that_partial_reads_stay_small_and_verified(tmp_path: Path, rng: random.Random) -> None:
    raw = rng.randbytes(2 * MAX_SLICE_BYTES + 12)
    save_sharded(tmp_path, "t", [Interval("w", "param", (len(raw) // 4,), "F32", 0, raw)], step=0)
    checkpoint = open_checkpoint(tmp_path)
    assert [piece.length * 4 for piece in checkpoint.entry("w", "param").slices] == [MAX_SLICE_BYTES] * 2 + [12]
    for begin, end in ((0, 3), (MAX_SLICE_BYTES // 4 - 1, MAX_SLICE_BYTES // 4 + 2), (5, len(raw) // 4)):
        for verify in (True, False):
            out = bytearray((end - begin) * 4)
            checkpoint.read_into("w", "param", begin, out, verify=verify)
            assert out == raw[begin * 4 : end * 4]


def test_many_reads_run_together(tmp_path: Path, rng: random.Random) -> None:
    raw = rng.randbytes(1 << 20)
    save_sharded(tmp_path, "t", [Interval("w", "param", (1 << 20,), "U8", 0, raw)], step=0)
    outs = [bytearray(1000) for _ in range(50)]
    requests = [ReadRequest("w", "param", 1000 * index, out) for index, out in enumerate(outs)]
    open_checkpoint(tmp_path).read_many(requests)
    assert b"".join(outs) == raw[:50_000]


def test_requests_that_need_the_same_slice_share_its_read(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = rng.randbytes(1000 * 64)
    save_sharded(tmp_path, "t", [Interval("w", "param", (1000, 64), "U8", 0, raw)], step=0)
    checkpoint, reads = open_checkpoint(tmp_path), []

    def counting(fd: int, position: int, out: memoryview, where: str) -> None:
        reads.append(position)
        read_fd(fd, position, out, where)

    for module in (opened, reader):
        monkeypatch.setattr(module, "read_fd", counting)
    rows = [bytearray(8) for _ in range(1000)]  # the columns 16 to 24
    checkpoint.read_many([ReadRequest("w", "param", 64 * row + 16, out) for row, out in enumerate(rows)])
    assert all(out == raw[64 * row + 16 : 64 * row + 24] for row, out in enumerate(rows))
    assert len(reads) == 2  # the header and the slice


def test_data_may_be_staged_lazily_through_one_reused_buffer(tmp_path: Path) -> None:
    staging = bytearray(4096)

    def stage(value: int) -> bytearray:
        staging[:] = bytes([value]) * 4096
        return staging

    lazy = [Interval(f"w{i}", "param", (4096,), "U8", 0, lambda i=i: stage(i), 4096) for i in range(20)]
    save_sharded(tmp_path, "t", lazy, step=0)
    checkpoint = open_checkpoint(tmp_path)
    for i in range(20):
        assert checkpoint.read(f"w{i}", "param") == bytes([i]) * 4096


def test_client_state_config_and_aliases_come_back(tmp_path: Path) -> None:
    state = {"epoch": 3, "lr": 1e-4, "rng": b"\0\xff", "big": 1 << 127, "list": [None, True, -5, "ü"]}
    save_sharded(
        tmp_path,
        "t",
        [Interval("wte", "param", (2,), "U8", 0, b"ab")],
        step=9,
        aliases={"lm_head": "wte"},
        client_state=state,
        config={"zero": {"stage": 3}},
    )
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.client_state == state and checkpoint.config == {"zero": {"stage": 3}}
    assert checkpoint.aliases == {"lm_head": "wte"} and checkpoint.read("lm_head", "param") == b"ab"


def test_client_state_that_is_not_plain_data_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(NotPlainDataError, match=r"client_state\['sampler'\]\[1\] is a builtins.object"):
        save_sharded(tmp_path, "t", [], step=0, client_state={"sampler": [0, object()]})
    with pytest.raises(NotPlainDataError, match=r"client_state\['a'\] has the key 3 of type int"):
        save_sharded(tmp_path, "t", [], step=0, client_state={"a": {3: 1}})
    itself: list[object] = []
    itself.append(itself)
    with pytest.raises(NotPlainDataError, match="refers to itself"):
        save_sharded(tmp_path, "t", [], step=0, client_state=itself)
    assert not (tmp_path / "t").exists()


def test_small_files_of_the_callers_own_appear_with_the_checkpoint(tmp_path: Path) -> None:
    saved = save_sharded(tmp_path, "t", [one()], step=0, beside={"facts.pt": b"facts"})
    assert (saved / "facts.pt").read_bytes() == b"facts" and open_checkpoint(saved).read("w", "param") == b"abcd"
    for name in ("manifest.msgpack", "rank-00000.safetensors", "../facts"):
        with pytest.raises(CheckpointError, match="not the checkpoint's own"):
            save_sharded(tmp_path, "bad", [one()], step=0, beside={name: b""})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "t", "zero_to_fp32.py"]


def one(name: str = "w", **changes: object) -> Interval:
    fields: dict[str, object] = {"kind": "param", "shape": (4,), "dtype": "U8", "offset": 0, "data": b"abcd"}
    return Interval(name, **{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("intervals", "message"),
    [
        ([one(data=b"ab")], "no rank contributes elements 2 to 4"),
        ([one(), one(offset=3, data=b"x")], "rank 0 contributes element 3 twice"),
        ([one(offset=2)], "elements 2 to 6 are outside of shape"),
        ([one(dtype="F7")], "unknown dtype 'F7'"),
        ([one(dtype="F64")], "data of 4 bytes is not whole F64 elements"),
        ([one(data=lambda: b"abcd")], "needs its length"),
        ([one(data=lambda: b"abc", length=4)], "expected 4 elements of U8 from its data function, got 3 bytes"),
        ([one(data=17)], "data is neither a buffer nor a function"),
        ([one(kind="a/b")], "a kind is"),
        ([one(name="")], "must be a string that is not empty"),
    ],
)
def test_bad_intervals_are_refused_by_name(tmp_path: Path, intervals: list[Interval], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_sharded(tmp_path, "t", intervals, step=0)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_ranks_that_disagree_on_a_tensor_are_told(tmp_path: Path) -> None:
    def save(group: ThreadCoordinator) -> Path:
        shape = (4,) if group.rank == 0 else (2, 2)
        return save_sharded(tmp_path, "t", [one(shape=shape)], step=0, coordinator=group)

    for error in on_ranks(2, save):
        assert "U8 (4,) on rank 0 but U8 (2, 2) on rank 1" in str(error)


@pytest.mark.parametrize("tag", ["", ".hidden", "a/b", "latest", "x" * 201])
def test_a_tag_must_be_a_directory_name(tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be a tag"):
        save_sharded(tmp_path, tag, [], step=0)


def test_reading_what_is_not_there_is_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path, "t", [one()], step=0)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(NotFoundError, match="no tensor 'v' of kind 'param'"):
        checkpoint.read("v", "param")
    with pytest.raises(MismatchError, match="from element 2 on are not an interval"):
        checkpoint.read_into("w", "param", 2, bytearray(3))
    with pytest.raises(MismatchError, match="writable"):
        checkpoint.read_into("w", "param", 0, b"1234")


def test_data_starts_on_a_block_and_other_tools_read_the_file(tmp_path: Path, rng: random.Random) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    data = contents(rng)
    del data["norm.bias", "param"], data["embed.weight", "param"]  # numpy has neither fp8 nor bf16
    path = save_sharded(tmp_path, "t", shard(data, 0, 1), step=0) / "rank-00000.safetensors"
    loaded = safetensors.load_file(path)
    assert loaded["exp_avg/embed.weight@0"].tobytes() == data["embed.weight", "exp_avg"]
    assert (int.from_bytes(path.read_bytes()[:8], "little") + 8) % 4096 == 0
