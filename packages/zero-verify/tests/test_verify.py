"""The oracle finds planted faults and names the tensor; a clean run passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_comm import run_ranks
from zero_core import Config
from zero_core.cli import main
from zero_core.monitors import NoMonitor, build_monitor
from zero_verify import Bitwise, Difference, Recording, ScriptRun, Variant, Within, compare, run_script
from zero_verify.variants import variant_config

SCRIPT = Path(__file__).with_name("training_script.py")
RANKS = 2
SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.05,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3, "unit_min_numel": 1, "stage3_param_persistence_threshold": 10},
}


def record(plan: ScriptRun) -> None:
    run_script(plan)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that runs the script on two ranks and returns the recording; the same run is made once."""
    folder = tmp_path_factory.mktemp("recordings")
    made: dict[Any, Recording] = {}

    def run(fault: str = "none", variant: Variant = Variant.GIVEN, **changes: Any) -> Recording:
        key = json.dumps([fault, variant.value, changes])
        if key not in made:
            place = folder / str(len(made))
            place.mkdir()
            config = place / "ds.json"
            config.write_text(json.dumps({**SETTINGS, **changes}))
            plan = ScriptRun(str(place), variant.value, str(SCRIPT), (fault,), config=str(config), steps=3)
            run_ranks(record, RANKS, plan)
            made[key] = Recording(place)
        return made[key]

    return run


def found(runs: Any, fault: str) -> Difference:
    difference = compare(runs(variant=Variant.REFERENCE), runs(fault), Bitwise())
    assert difference is not None
    return difference


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_clean_run_is_bitwise_equal_to_stage_0(stage: int, runs: Any) -> None:
    zero = {**SETTINGS["zero_optimization"], "stage": stage}
    reference, given = runs(variant=Variant.REFERENCE), runs(zero_optimization=zero)
    assert reference.count(0) == given.count(0) == 3
    assert next(reference.steps(0)).config["zero_optimization"]["stage"] == 0
    assert next(given.steps(0)).config["zero_optimization"]["stage"] == stage
    assert compare(reference, given, Bitwise()) is None


def test_a_clean_run_holds_every_value_of_a_step(runs: Any) -> None:
    step = next(runs().steps(0))
    names = ["enter.weight", "enter.bias", *(f"blocks.{i}.{p}" for i in range(3) for p in ("weight", "bias"))]
    assert step.names("gradient") == step.names("weight") == [*names, "head.weight", "head.bias"]
    assert [len(losses) for losses in step.losses] == [2, 2] and step.losses[0] != step.losses[1]
    assert {len(digests) for digests in step.reads.values()} == {2} and len(step.reads) == 2 * 10
    total = sum(float(step.tensor("gradient", name).double().square().sum()) for name in step.names("gradient"))
    assert step.norm == pytest.approx(total**0.5, rel=1e-6) and step.norm > SETTINGS["gradient_clipping"]


@pytest.mark.parametrize("fault", ("dropped reduction", "wrong divisor"))
def test_a_faulty_reduction_is_found_in_the_gradients_of_its_unit(fault: str, runs: Any) -> None:
    difference = found(runs, fault)
    assert (difference.step, difference.what, difference.name) == (0, "the gradient", "blocks.1.weight")
    assert difference.others == ("blocks.1.bias",)
    assert "1,024 of 1,024 elements" in str(difference)


def test_an_unclipped_shard_is_found_in_the_weights_that_its_rank_updates(runs: Any) -> None:
    difference = found(runs, "unclipped shard")
    assert (difference.step, difference.what) == (0, "the weight after the step")
    assert difference.name == "enter.weight" and "the first at [21, 2]" in difference.detail  # element 128
    assert {"blocks.0.weight", "head.weight"} <= set(difference.others)


def test_a_stale_gather_is_found_in_the_weight_that_forward_reads(runs: Any) -> None:
    difference = found(runs, "stale gather")
    assert (difference.step, difference.what, difference.name) == (
        1,
        "the weight that forward reads",
        "blocks.1.weight",
    )
    assert difference.others == ("blocks.1.bias",) and "on rank 1" in difference.detail


def test_sixteen_bits_stay_within_a_bound_of_float32_that_wrong_gradients_leave(runs: Any) -> None:
    narrow = {"bf16": {"enabled": True}}
    reference = runs(variant=Variant.FLOAT32, **narrow)
    assert next(reference.steps(0)).tensor("gradient", "head.bias").dtype == torch.float32
    assert compare(runs(variant=Variant.REFERENCE, **narrow), runs(**narrow), Bitwise()) is None
    within = Within(16 * torch.finfo(torch.bfloat16).eps)
    assert compare(reference, runs(**narrow), within) is None
    assert compare(reference, runs(**narrow), Within(1e-5)) is not None
    difference = compare(reference, runs("wrong divisor", **narrow), within)
    assert difference is not None and difference.name == "blocks.1.weight" and "root mean square" in difference.detail


def verify(tmp_path: Path, fault: str, *options: str) -> list[str]:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(SETTINGS))
    return ["verify", str(SCRIPT), "--config", str(config), "--steps", "2", *options, "--", fault]


@pytest.mark.soak
def test_the_command_names_the_tensor_and_fails_for_a_faulty_script(tmp_path: Path, capsys: Any) -> None:
    kept = tmp_path / "kept"
    assert main(verify(tmp_path, "wrong divisor", "--nproc", "1", "--keep", str(kept))) == 1
    assert "step 0: the gradient of 'blocks.1.weight' differs" in capsys.readouterr().out
    assert compare(Recording(kept / "reference"), Recording(kept / "again"), Bitwise()) is None
    assert Recording(kept / "given").count(0) == 2


@pytest.mark.soak
def test_the_program_ends_with_the_status_for_scripts(tmp_path: Path) -> None:
    for fault, status in (("none", 0), ("unclipped shard", 1), ("fails", 2)):
        command = [sys.executable, "-m", "zero_core.cli", *verify(tmp_path, fault)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
        assert ("is bitwise equal to stage 0 on 2 ranks in 2 steps" in done.stdout) == (status == 0)


@pytest.mark.soak
def test_the_command_tells_a_script_that_does_not_repeat_from_a_faulty_one(tmp_path: Path, capsys: Any) -> None:
    assert main(verify(tmp_path, "does not repeat")) == 2
    assert "does not repeat itself" in capsys.readouterr().err


def test_the_command_refuses_what_it_cannot_run(tmp_path: Path, capsys: Any) -> None:
    assert main(["verify", str(tmp_path / "absent.py")]) == 2
    assert "absent.py" in capsys.readouterr().err
    assert main(["verify", str(SCRIPT), "--config", str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err


@pytest.mark.parametrize("variant", Variant)
def test_runs_write_to_no_monitor(variant: Variant) -> None:
    sections = {key: {"enabled": True} for key in ("csv_monitor", "tensorboard", "wandb", "comet")}
    settings = Config.load(variant_config({**SETTINGS, **sections}, variant, 1), world_size=1)
    assert isinstance(build_monitor(settings, rank=0), NoMonitor)


def test_a_difference_reads_as_two_sentences_of_english() -> None:
    difference = Difference("", 2, "the gradient", "a.weight", "expected 1.0, got 2.0", ("a.bias", "b.weight"))
    assert str(difference) == (
        "step 2: the gradient of 'a.weight' differs: expected 1.0, got 2.0\n  so does the gradient of a.bias, b.weight"
    )
