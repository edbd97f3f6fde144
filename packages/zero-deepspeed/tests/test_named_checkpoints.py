"""Checkpoints through DeepSpeed's names: folders, tags, client state, and the files that scripts look for."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from named_cases import batch, build, start, train
from torch import nn

from zero_ckpt import CheckpointError, verify
from zero_ckpt.zero_to_fp32 import convert_zero_checkpoint_to_state_dict
from zero_comm import run_ranks
from zero_deepspeed import VERSION
from zero_deepspeed.state_files import get_model_state_file, get_optim_files

pytestmark = pytest.mark.usefixtures("alone")


def test_a_checkpoint_resumes_exactly_and_a_missing_one_is_none(tmp_path: Path) -> None:
    engine = start(2)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    assert (tmp_path / "latest").read_text().strip() == "global_step2"
    expected = train(engine, 2, 4)
    again = start(2, build(seed=7))
    path, client = again.load_checkpoint(tmp_path)
    assert path is not None and Path(path).name == "global_step2"
    assert client == {"epoch": 3, "ds_version": VERSION}
    assert train(again, 2, 4) == expected


def a_folder_per_rank(folder: Path) -> tuple[list[float], list[float], list[str]]:
    mine = folder / f"rank{dist.get_rank()}"
    mine.mkdir()
    engine = start(3)
    train(engine, 0, 2)
    engine.save_checkpoint(mine)
    expected = train(engine, 2, 4)
    again = start(3, build(seed=7))
    path = again.load_checkpoint(mine)[0]
    assert again.load_checkpoint(folder / f"none{dist.get_rank()}") == (None, None)
    return expected, train(again, 2, 4), [str(path), *sorted(file.name for file in mine.iterdir())]


def another_view_per_rank(folder: Path) -> tuple[Any, Any]:
    """Load in a folder that is empty for rank 0, and has another `latest_universal` or `latest` for rank 1."""
    mine = folder / f"rank{dist.get_rank()}"
    (mine / "run").mkdir(parents=True)
    if dist.get_rank():
        (mine / "run" / "latest").write_text("global_step2")
        (mine / "run" / "latest_universal").write_text("universal")
    engine = start(2)
    os.chdir(mine)
    return engine.load_checkpoint("run")


def test_the_first_rank_looks_for_latest(tmp_path: Path) -> None:
    assert run_ranks(another_view_per_rank, 2, tmp_path) == [(None, None)] * 2


@pytest.mark.parametrize("form", ("native", "deepspeed"))
def test_checkpoints_without_a_latest_are_not_passed_over(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(2, checkpoint={"format": form})
    for step in range(2):
        train(engine, step, step + 1)
        engine.save_checkpoint(tmp_path, save_latest=False)
    assert not (tmp_path / "latest").exists()
    again = start(2, build(seed=7))
    path, _ = again.load_checkpoint(tmp_path)
    assert Path(str(path)).name == "global_step2" and again.global_steps == 2
    assert f"no file 'latest' in {tmp_path} and no tag given: the newest checkpoint there is loaded" in caplog.text
    for file in tmp_path.glob("global_step*/*"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError):
        again.load_checkpoint(tmp_path)


def test_ranks_that_name_different_folders_share_the_first_one(tmp_path: Path) -> None:
    found = run_ranks(a_folder_per_rank, 2, tmp_path)
    for expected, resumed, _ in found:
        assert resumed == expected
    paths, files = zip(*((seen[0], seen[1:]) for *_, seen in found), strict=True)
    assert set(paths) == {str(tmp_path / "rank0" / "global_step2")}
    assert "latest" in files[0] and not files[1]


def test_client_state_of_any_kind_comes_back(tmp_path: Path) -> None:
    state = {
        "best": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "nothing": torch.empty(0, 3),
        "pair": (1, [torch.tensor(True)]),
        "milestones": {10: 1, ("a", 2): {"x", "y"}},
    }
    engine = start(1)
    engine.save_checkpoint(tmp_path, client_state=state)
    found = engine.load_checkpoint(tmp_path)[1]
    assert torch.equal(found.pop("best"), state.pop("best"))
    assert found.pop("nothing").shape == state.pop("nothing").shape
    assert found == {**state, "ds_version": VERSION}


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_scripts_find_the_facts_of_a_checkpoint_in_files_of_deepspeeds_names(stage: int, tmp_path: Path) -> None:
    engine = start(stage, bf16={"enabled": stage == 3})
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    folder = tmp_path / "global_step0"
    model = torch.load(get_model_state_file(folder, stage), weights_only=True)
    assert (model["epoch"], model["dp_world_size"], model["ds_config"]) == (3, 1, engine.config)
    assert model["param_shapes"][0]["head.weight"] == engine.module.head.weight.shape
    if stage == 0:
        with pytest.raises(FileNotFoundError, match="optim_states"):
            get_optim_files(folder)
        return
    (file,) = get_optim_files(folder)
    assert Path(file).name == ("bf16_" if stage == 3 else "") + "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    assert torch.load(file, weights_only=True)["optimizer_state_dict"]["zero_stage"] == stage
    assert verify(tmp_path)
    convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "out", torch.bfloat16)
    whole = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(whole["head.weight"], engine.module.head.weight.bfloat16())
    with pytest.raises(CheckpointError, match="expected one of float32, float16, bfloat16"):
        convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "out", "int8")


def test_a_custom_function_loads_the_weights(tmp_path: Path) -> None:
    engine = start(3)
    engine.save_checkpoint(tmp_path)
    names = []

    def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        names.extend(src)
        with torch.no_grad():
            dst.head.weight.copy_(src["head.weight"] + 1)

    before = engine.module.head.weight.detach().clone()
    engine.load_checkpoint(tmp_path, load_optimizer_states=False, custom_load_fn=load)
    assert "head.weight" in names and torch.equal(engine.module.head.weight, before + 1)


@pytest.mark.parametrize("asked", (False, True))
def test_save_16bit_model_at_stage_3_needs_the_key(asked: bool, tmp_path: Path) -> None:
    engine = start(3, zero_optimization={"stage": 3, "stage3_gather_16bit_weights_on_model_save": asked})
    assert engine.save_16bit_model(tmp_path, "model.bin") is asked
    assert (tmp_path / "model.bin").exists() is asked


def save_by_different_tags(folder: str, validation: str) -> tuple[str, list[str]]:
    engine = start(2, checkpoint={"tag_validation": validation})
    train(engine, 0, 1)
    said = io.StringIO()
    logging.getLogger("DeepSpeed").addHandler(handler := logging.StreamHandler(said))
    try:
        engine.save_checkpoint(folder, tag=f"tag-{dist.get_rank()}")
        outcome = "saved"
    except AssertionError as error:
        outcome = f"{type(error).__name__}: {error}"
    logging.getLogger("DeepSpeed").removeHandler(handler)
    engine.destroy()
    return outcome, said.getvalue().splitlines()


@pytest.mark.parametrize("validation", ["WARN", "ignore", "Fail"])
def test_tags_that_differ_are_validated_as_the_configuration_says(validation: str, tmp_path: Path) -> None:
    results = run_ranks(save_by_different_tags, 2, str(tmp_path), validation)
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    for rank, (outcome, said) in enumerate(results):
        if validation == "Fail":
            assert outcome.startswith("TagError: save_checkpoint: the ranks have different tags, tag-0, tag-1")
        else:
            assert outcome == "saved" and folders == ["tag-0"]
        warned = [line for line in said if "the tag of rank 0 counts, 'tag-0'" in line]
        assert len(warned) == (rank == 1 and validation == "WARN")
    assert folders == ([] if validation == "Fail" else ["tag-0"])


@pytest.mark.parametrize("folder", [None, ""])
def test_a_checkpoint_needs_a_folder(folder: Any) -> None:
    engine = start(0)
    with pytest.raises(ValueError, match="expected a folder"):
        engine.save_checkpoint(folder)
    engine.destroy()


def test_backward_returns_the_divided_loss_in_its_own_dtype() -> None:
    engine = start(1, bf16={"enabled": True}, gradient_accumulation_steps=2)
    loss = engine(batch(0).bfloat16())
    divided = engine.backward(loss)
    assert loss.dtype == divided.dtype == torch.bfloat16 and torch.equal(divided, loss.detach() / 2)
    engine.destroy()
