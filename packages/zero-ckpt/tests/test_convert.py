"""Conversion changes the format and, where asked, the dtype, and nothing else."""

from __future__ import annotations

import json
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRuns
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from converted import blocks, checkpoint, weights_only  # noqa: E402

import zero_ckpt  # noqa: E402
from zero_ckpt import CheckpointError, DamagedError, Interval, convert, open_checkpoint, save_sharded  # noqa: E402
from zero_ckpt.conversion import open_source, output_nbytes  # noqa: E402
from zero_ckpt.conversion.dtypes import convert_dtype  # noqa: E402
from zero_ckpt.conversion.model import parse_size  # noqa: E402
from zero_ckpt.locking import root_lock  # noqa: E402
from zero_ckpt.torch import tensor_buffer, torch_dtype  # noqa: E402
from zero_ckpt.zero_to_fp32 import (  # noqa: E402
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)


def test_one_file_in_fp32_takes_masters_and_keeps_integers(tmp_path: Path) -> None:
    values = checkpoint(tmp_path / "ckpt")
    assert convert(tmp_path / "ckpt", tmp_path / "out.safetensors") == [tmp_path / "out.safetensors"]
    loaded = safetensors.load_file(tmp_path / "out.safetensors")
    assert set(loaded) == {"embed.weight", "mid.weight", "scale", "count", "none"}
    assert torch.equal(loaded["embed.weight"], values["master"])
    assert torch.equal(loaded["scale"], values["scale"].float()) and torch.equal(loaded["count"], values["count"])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_are_rounded_as_torch_rounds(tmp_path: Path, dtype: str) -> None:
    values = checkpoint(tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "out.safetensors", dtype=dtype)
    loaded = safetensors.load_file(tmp_path / "out.safetensors")
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float16
    assert torch.equal(loaded["mid.weight"], values["mid.weight"].to(wanted))
    assert torch.equal(loaded["embed.weight"], values["master"].to(wanted))


def test_keep_changes_no_bit(tmp_path: Path) -> None:
    values = checkpoint(tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "out.safetensors", dtype="keep")
    loaded = safetensors.load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in values.items() if name != "master")


def test_shards_have_the_index_that_loaders_expect(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ckpt")
    files = convert(tmp_path / "ckpt", tmp_path / "out", max_shard_size="500")
    assert [file.name for file in files] == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    convert(tmp_path / "ckpt", tmp_path / "one.safetensors")
    whole = safetensors.load_file(tmp_path / "one.safetensors")
    assert index["metadata"]["total_size"] == sum(value.numel() * value.element_size() for value in whole.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.load_file(tmp_path / "out" / file)[name], whole[name])
    again = convert(tmp_path / "out", tmp_path / "two.safetensors", dtype="keep")
    assert {name: value.tolist() for name, value in safetensors.load_file(again[0]).items()} == {
        name: value.tolist() for name, value in whole.items()
    }


@pytest.mark.parametrize("target", ["o.safetensors", "o.bin", "run"])
def test_progress_ends_where_it_is_announced_to_end(tmp_path: Path, target: str) -> None:
    checkpoint(tmp_path / "ckpt")
    to = "zero-ckpt" if target == "run" else None
    seen: list[int] = []
    convert(tmp_path / "ckpt", tmp_path / target, to=to, progress=seen.append)
    assert sum(seen) == output_nbytes(open_source(tmp_path / "ckpt"), target, to=to) > 0


@pytest.mark.parametrize("name", ["../../escaped", "/escaped", "..", "a/b"])
def test_names_that_lead_outside_are_not_followed(tmp_path: Path, name: str) -> None:
    parts = [Interval(n, kind, (2,), "F32", 0, bytes(8)) for n in ("good", name) for kind in ("param", "exp_avg")]
    save_sharded(tmp_path / "ckpt", "t", parts, step=1)
    with pytest.raises(CheckpointError, match="cannot be a directory of a universal checkpoint"):
        convert(tmp_path / "ckpt", tmp_path / "a" / "b", to="deepspeed-universal")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name != "zero_to_fp32.py") == sorted(
        ["a", "b", "ckpt", "latest", "manifest.msgpack", "rank-00000.safetensors", "t"]
    )


def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    for text in ('{"weight_map": {"w": "../x.safetensors"}}', "[]", "{", '{"weight_map": {"w": 1}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(DamagedError, match="model.safetensors.index.json"):
            open_source(tmp_path)


def test_pytorch_files_keep_ties(tmp_path: Path) -> None:
    values = checkpoint(tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "pytorch_model.bin")
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert torch.equal(loaded["head.weight"], values["master"])
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin") as archive:
        assert archive.testzip() is None
    mapped = torch.load(tmp_path / "pytorch_model.bin", weights_only=True, mmap=True)
    assert set(mapped) == {*values, "head.weight"} - {"master"} and mapped["none"].shape == (0, 3)
    assert torch.equal(mapped["scale"], values["scale"].float()) and torch.equal(mapped["count"], values["count"])
    files = convert(tmp_path / "ckpt", tmp_path / "out", to="pytorch", max_shard_size="500")
    index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())
    assert len(files) == 3 and index["weight_map"]["head.weight"] == index["weight_map"]["embed.weight"]


def test_deepspeeds_functions_read_lazily_and_leave_out_what_is_frozen(tmp_path: Path) -> None:
    values = checkpoint(tmp_path / "ckpt")
    lazy = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt", tag="t", lazy_mode=True)
    assert lazy["mid.weight"].shape == (11, 11) and lazy["mid.weight"].dtype == torch.float32
    assert torch.equal(lazy["head.weight"].contiguous(), values["master"])
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt", exclude_frozen_parameters=True)
    assert set(trained) == {"embed.weight", "head.weight", "count"}
    said = get_fp32_state_dict_from_zero_checkpoint(weights_only(tmp_path), exclude_frozen_parameters=True)
    assert set(said) == {"weight", "bias"}  # the checkpoint says which are trained, without any state
    save_sharded(tmp_path / "unsaid", "t", [Interval("w", "param", (1,), "F32", 0, bytes(4))], step=0)
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "unsaid", exclude_frozen_parameters=True)
    model = torch.nn.ModuleDict({"mid": torch.nn.Linear(11, 11)})
    load_state_dict_from_zero_checkpoint(model, str(tmp_path / "ckpt"))
    assert torch.equal(model["mid"].weight, values["mid.weight"])


def test_ties_survive_safetensors_and_back(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "back", to="zero-ckpt")
    assert open_checkpoint(tmp_path / "back").aliases == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("stored", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("wanted", ["F64", "F32", "F16", "BF16"])
def test_every_pair_of_dtypes_converts_as_torch_does(stored: str, wanted: str) -> None:
    bits = torch.randint(-(2**31), 2**31, (5000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 65520.0, 1e-8, 3.4e38, 1.0039062]
    )
    values = torch.cat([bits, special, torch.randn(1000)]).to(torch_dtype(stored))
    if stored == "F64":
        values = torch.cat([values, torch.tensor([1e300, -1e300, 1e-300], dtype=torch.float64)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed = convert_dtype(tensor_buffer(values), stored, wanted)
    got = torch.frombuffer(bytearray(changed), dtype=torch_dtype(wanted))
    expected = values.float().to(torch_dtype(wanted)) if "BF16" in (stored, wanted) else values.to(torch_dtype(wanted))
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_size(text) for text in ("5GB", "512MiB", "1.5 kb", "7", 9)] == [5 * 10**9, 512 << 20, 1500, 7, 9]
    with pytest.raises(CheckpointError, match="is not a size"):
        parse_size("many")


def test_a_torch_distributed_checkpoint_is_read(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model = torch.nn.Linear(5, 3)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = open_source(tmp_path / "dcp")
    assert set(source.tensors) == {("weight", "param"), ("bias", "param")}
    convert(tmp_path / "dcp", tmp_path / "out.safetensors")
    assert torch.equal(safetensors.load_file(tmp_path / "out.safetensors")["weight"], model.weight)


def test_metadata_that_is_code_is_not_run(tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("executed",))

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="builtins.print is not allowed"):
        open_source(tmp_path)
    torch.save({"module": Evil()}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="holds objects that are not read"):
        open_source(tmp_path)


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="is not a checkpoint that is known here"):
        open_source(tmp_path)
    with pytest.raises(CheckpointError, match="'fp7' is no output dtype"):
        checkpoint(tmp_path / "c")
        convert(tmp_path / "c", tmp_path / "o", dtype="fp7")


def _trained(root: Path) -> None:
    """A checkpoint after one step."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    zero_ckpt.save(root, {"model": model, "optimizer": optimizer}, step=1)


def test_a_universal_checkpoint_holds_everything_and_is_read_back(tmp_path: Path) -> None:
    _trained(tmp_path / "ckpt")
    (written,) = convert(tmp_path / "ckpt", tmp_path / "out", to="deepspeed-universal")
    assert (tmp_path / "out" / "latest_universal").read_text() == written.name == "global_step1"
    common = torch.load(written / "zero" / "optimizer_state.pt", weights_only=True)
    assert common["param_groups"][0]["lr"] == 0.1 and common["param_groups"][0]["betas"] == (0.9, 0.999)
    convert(tmp_path / "out", tmp_path / "back", to="zero-ckpt")
    before, after = open_checkpoint(tmp_path / "ckpt"), open_checkpoint(tmp_path / "back")
    assert set(before.tensors) == set(after.tensors)
    for name, kind in before.tensors:
        assert before.read(name, kind) == after.read(name, kind)
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        convert(weights_only(tmp_path), tmp_path / "x", to="deepspeed-universal")


def test_a_universal_checkpoint_appears_under_the_lock_of_its_root(tmp_path: Path) -> None:
    _trained(tmp_path / "ckpt")
    root = tmp_path / "out"
    root.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with root_lock(root):
            work = pool.submit(convert, tmp_path / "ckpt", root, to="deepspeed-universal")
            with pytest.raises(StillRuns):
                work.result(timeout=1.0)
            assert not (root / "latest_universal").exists() and not (root / "global_step1").exists()
        assert work.result(timeout=30) == [root / "global_step1"]
    assert (root / "latest_universal").read_text() == "global_step1"


def test_a_trained_parameter_without_a_gradient_is_exported_as_trained(tmp_path: Path) -> None:
    model = blocks(tmp_path)
    assert open_checkpoint(tmp_path / "ckpt").frozen == {"1.weight", "5.weight"}
    (universal,) = convert(tmp_path / "ckpt", tmp_path / "out", to="deepspeed-universal")
    found = {path.name: path for path in (universal / "zero").iterdir() if path.is_dir()}
    assert set(found) == {f"{number}.weight" for number in (0, 2, 3, 4, 6, 7)}
    moments = torch.load(found["3.weight"] / "exp_avg.pt", weights_only=True)["param"]
    assert moments.shape == (64, 64) and not moments.any()
    assert torch.load(found["3.weight"] / "step.pt", weights_only=True) == 1
    assert torch.equal(torch.load(found["3.weight"] / "fp32.pt", weights_only=True)["param"], model[3].weight)
    state = torch.load(universal / "mp_rank_00_model_states.pt", weights_only=True)
    assert set(state["frozen_param_shapes"]) == {"1.weight", "5.weight"}
    assert torch.equal(state["frozen_param_fragments"]["5.weight"], model[5].weight)
    again = convert(universal, tmp_path / "again", to="zero-ckpt")[0]
    assert open_checkpoint(again).frozen == {"1.weight", "5.weight"}


def test_without_torch_what_needs_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks(tmp_path)
    (universal,) = convert(tmp_path / "ckpt", tmp_path / "universal", to="deepspeed-universal")
    monkeypatch.setattr("zero_ckpt.conversion.checks.find_spec", lambda name: None)
    for source, target in ((tmp_path / "ckpt", "out.bin"), (universal, "out.safetensors")):
        with pytest.raises(CheckpointError, match=r"needs torch: pip install zero-ckpt\[torch\]"):
            convert(source, tmp_path / target)
    with pytest.raises(CheckpointError, match="writing a universal checkpoint of DeepSpeed needs torch"):
        convert(tmp_path / "ckpt", tmp_path / "other", to="deepspeed-universal")
    assert convert(tmp_path / "ckpt", tmp_path / "out.safetensors")[0].is_file()
