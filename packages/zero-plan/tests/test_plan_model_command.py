"""`zero-plan model`: a Transformers model from its configuration alone, on ranks that do not exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zero_plan import plan
from zero_plan.cli import main
from zero_plan.hugging_face import model_and_batch

transformers = pytest.importorskip("transformers")

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 120, **WIDTHS}
VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 16, "patch_size": 8, **WIDTHS}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2}
ENGINE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1},
}


def write(folder: Path, **files: Any) -> list[str]:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ["model", "--hf-config", str(folder / "model.json"), "--config", str(folder / "ds.json")]


def test_its_numbers_are_those_of_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = write(tmp_path, model=LLAMA, ds=ENGINE)
    options = ["--batch", "2x8", "--world-size", "6", "--ranks-per-node", "3", "--rank", "0", "--json"]
    assert main([*command, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    build, batch = model_and_batch(str(tmp_path / "model.json"), 2, 8)
    config = {**ENGINE, "train_micro_batch_size_per_gpu": 2, "comm": {"ranks_per_node": 3}}
    assert found == json.loads(json.dumps(plan(build, config, batch=batch, world_size=6, ranks=[0]).as_dict()))
    parameters = sum(p.numel() for p in transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).parameters())
    [rank] = found["ranks"]
    moments = sum(row["nbytes"] for row in rank["held"] if row["kind"] == "optimizer states")
    assert parameters * 8 / 6 <= moments < parameters * 8 / 6 * 1.02
    reduced = [row for row in rank["sent"] if row["phase"] == "reduce"]
    assert 0 < sum(row["across_bytes"] for row in reduced) < sum(row["sent_bytes"] for row in reduced)


def test_a_model_of_images_and_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = write(tmp_path, model=VIT, ds=ENGINE)
    assert main([*command, "--batch", "2", "--world-size", "2", "--checkpoint", "--saved-by", "1"]) == 0
    printed = capsys.readouterr().out
    checkpoint = "rank 1 of 2: a save, which writes", "rank 1 of 2: loading a checkpoint of world size 1"
    for title in ("rank 0 of 2: between two steps", "at the peak", "rank 1 of 2: sent in a step", *checkpoint):
        assert title in printed


def test_a_mixture_of_experts_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = write(tmp_path, model=MIXTRAL, ds=ENGINE)
    assert main([*command, "--batch", "1x64", "--world-size", "2", "--rank", "0", "--json"]) == 0
    [rank] = json.loads(capsys.readouterr().out)["ranks"]
    experts = 3 * 2 * 32 * 64 * (64 * 2)  # three products of two layers: multiply, add, for two experts of each token
    assert rank["flops"]["float32"] >= 3 * experts  # forward and both products of backward


@pytest.mark.parametrize(
    ("model", "engine", "batch", "message"),
    [
        ({"hidden_size": 3}, ENGINE, "1x8", 'expected the config.json of a Transformers model, with a "model_type"'),
        ({**LLAMA, "architectures": ["Nobody"]}, ENGINE, "1x8", 'expected "architectures" to begin with a class of'),
        ({**LLAMA, "model_type": "nothing"}, ENGINE, "1x8", "Transformers does not know such a model"),
        (LLAMA, ENGINE, "1", "describes a model of text: expected SAMPLESxTOKENS, such as 1x4096"),
        (VIT, ENGINE, "1x8", "describes a model of images: expected a number of samples"),
        (LLAMA, {**ENGINE, "train_micro_batch_size_per_gpu": 4}, "2x8", "--batch: expected 4 samples"),
        (LLAMA, {**ENGINE, "zero_optimisation": {}}, "2x8", "zero_optimisation"),
        (LLAMA, [], "2x8", "expected a JSON object, got list"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Any, engine: Any, batch: str, message: str
) -> None:
    assert main([*write(tmp_path, model=model, ds=engine), "--batch", batch, "--world-size", "2"]) == 2
    assert message in capsys.readouterr().err


def test_any_value_of_the_machine_can_be_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*write(tmp_path, model=LLAMA, ds=ENGINE), "--batch", "2x8", "--world-size", "2", "--rank", "0", "--json"]
    assert main([*command, "--machine", "dgx-2", "--set", "device.memory=1 kB"]) == 1
    fits = {row["tier"]: row for row in json.loads(capsys.readouterr().out)["fits"]}
    assert fits["device"]["capacity"] == 1000 and not fits["device"]["fits"]
    assert main([*command, "--set", "device.memory=1 kB"]) == 2
    assert "expected --machine with it" in capsys.readouterr().err


def test_a_batch_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for batch in ("0x8", "2x", "few"):
        with pytest.raises(SystemExit):
            main([*write(tmp_path, model=LLAMA, ds=ENGINE), "--batch", batch, "--world-size", "2"])
        assert "expected samples x tokens, such as 1x4096" in capsys.readouterr().err
