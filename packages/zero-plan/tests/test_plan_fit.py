"""`zero-plan fit` and `fits`: what fits on a machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zero_comm import run_ranks
from zero_plan import Machine, PlanError, Setup, configuration, estimate_step, load_machine, search
from zero_plan.cli import main
from zero_plan.fitting import judge_fit
from zero_plan.planned import FileRow, LoadedPlan, Peak, Plan, RankPlan, SavedPlan
from zero_plan.shapes import load_shape

DEEPSPEED_KEYS = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "bf16"),
    *("zero_optimization", "stage", "offload_optimizer", "offload_param", "device", "nvme_path", "enabled"),
    *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "type", "params"),
    "gradient_clipping",
}


def machine(**values: str) -> Machine:
    changed = {key.replace("__", "."): value for key, value in values.items()}
    return load_machine("h100-sxm-80gb-x8").with_values(changed)


def test_what_fits_comes_first_by_its_bound_and_nothing_that_does_not_fit_comes_at_all() -> None:
    shape, tight = load_shape("llama-3-8b", {"sequence": 2048}), machine(device__memory="40 GB")
    found = search(shape, tight, train_batch=32)
    assert found.fitting and len(found.fitting) < found.tried
    bounds = [candidate.seconds for candidate in found.fitting]
    assert bounds == sorted(bounds)
    for candidate in found.fitting:
        assert all(row.needed <= row.capacity for row in candidate.estimate.fits if row.capacity is not None)
        assert all(row.capacity is not None for row in candidate.estimate.fits)
    first = found.fitting[0]
    choice, accumulation = first.choice, 32 // 8 // first.choice.micro_batch
    tiers = {"offload_optimizer": choice.offload_optimizer, "offload_parameters": choice.offload_parameters}
    setup = Setup(stage=choice.stage, world_size=8, ranks_per_node=8, accumulation=accumulation, **tiers)
    options = {"micro_batch": choice.micro_batch, "checkpointing": choice.checkpointing}
    assert first.estimate == estimate_step(shape, setup, tight, **options)
    assert not any(candidate.choice.qwz for candidate in found.fitting)  # one node: nothing to compress


def test_every_rejected_neighbour_has_a_reason_and_less_memory_offloads() -> None:
    shape = load_shape("llama-3-8b", {"sequence": 2048})
    found = search(shape, machine(device__memory="40 GB"), train_batch=32)
    reasons = {row.change: row.reason for row in found.rejected}
    assert "too many" in reasons["stage 0"]
    assert "disk.capacity is not given" in reasons["offload optimizer nvme"]
    assert all(reasons.values())
    small = search(shape, machine(device__memory="14 GB"), train_batch=8).fitting[0].choice
    assert small.offload_optimizer == "host" and small.checkpointing != "none"
    assert not search(shape, machine(device__memory="1 GB"), train_batch=8).fitting


@pytest.mark.parametrize("memory", ("80 GB", "14 GB"))
def test_the_configuration_is_one_that_the_engine_and_deepspeed_know(tmp_path: Path, memory: str) -> None:
    from zero_settings import Config

    written = tmp_path / "ds.json"
    options = ["--shape", "llama-3-8b", "--sequence", "2048", "--machine", "h100-sxm-80gb-x8", "--train-batch", "16"]
    assert main(["fit", *options, "--set", f"device.memory={memory}", "--write", str(written)]) == 0
    found = json.loads(written.read_text())
    config = Config.load(found, world_size=8)
    assert config.train_batch_size == 16 and config.gradient_clipping == 1.0  # the default is another one in DeepSpeed
    assert config.zero_optimization.offload_optimizer.device == ("none" if memory == "80 GB" else "cpu")
    assert set(_keys(found)) <= DEEPSPEED_KEYS


def initialize(path: str) -> tuple[int, str, str, int, str]:
    """Train a step of a small model with the configuration file; return what the engine took from it."""
    import torch

    import zero_core

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    engine = zero_core.initialize(model=model, config=path)[0]
    zero = engine.resolved_config.zero_optimization
    steps = engine.gradient_accumulation_steps()
    dtype = next(engine.module.parameters()).dtype
    for _ in range(steps):
        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 8, dtype=dtype)).square().sum())
        engine.step()
    found = zero.stage, zero.offload_optimizer.device, zero.offload_param.device, steps, str(dtype)
    assert engine.global_steps == 1
    engine.destroy()
    return found


@pytest.mark.parametrize(("memory", "offload"), (("200 GB", False), ("80 GB", True)))
def test_a_real_engine_takes_the_written_file(tmp_path: Path, memory: str, offload: bool) -> None:
    written = tmp_path / "ds.json"
    options = ["--shape", "llama-3-8b", "--sequence", "2048", "--machine", "h100-sxm-80gb-x8", "--train-batch", "16"]
    sizes = ["--set", f"device.memory={memory}", "--set", "node.devices=2", "--nvme-path", str(tmp_path)]
    assert main(["fit", *options, *sizes, "--write", str(written)]) == 0
    found = json.loads(written.read_text())["zero_optimization"]
    stage, optimizer, parameters, steps, dtype = run_ranks(initialize, 2, str(written))[1]
    assert (stage, dtype) == (found["stage"], "torch.bfloat16")
    assert steps == json.loads(written.read_text())["gradient_accumulation_steps"]
    tiers = [found.get(section, {}).get("device", "none") for section in ("offload_optimizer", "offload_param")]
    assert [optimizer, parameters] == tiers and (tiers != ["none", "none"]) == offload


def test_many_nodes_may_compress_and_the_configuration_says_so() -> None:
    from zero_settings import Config

    slow = machine(network__per_node="10 GB/s")
    found = search(load_shape("llama-3-8b", {"sequence": 2048}), slow, train_batch=64, world_size=64)
    first = next(candidate for candidate in found.fitting if candidate.choice.hpz and candidate.choice.qgz)
    written = configuration(first)
    assert Config.load({**written, "comm": {"ranks_per_node": 8}}, world_size=64).zero_optimization.stage == 3
    assert written["zero_optimization"]["zero_hpz_partition_size"] == 8


def test_wrong_calls_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["fit", "--shape", "llama-3-8b", "--machine", "h100-sxm-80gb-x8", "--sequence", "512"]
    assert main([*base, "--train-batch", "12"]) == 2
    assert "expected a multiple of 8 ranks, got 12" in capsys.readouterr().err
    assert main([*base, "--train-batch", "8", "--write", str(tmp_path / "none" / "ds.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main([*base, "--train-batch", "8", "--set", "device.memory=1 GB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fitting"] == []
    on_disk = next(
        candidate
        for candidate in search(load_shape("gpt2-xl"), load_machine("dgx-2"), train_batch=16, dtype="fp16").fitting
        if candidate.choice.offload_optimizer == "nvme"
    )
    with pytest.raises(PlanError, match="offload_optimizer is on NVMe: expected --nvme-path"):
        configuration(on_disk)


def test_the_verdict_is_of_the_rank_that_needs_most_and_of_all_ranks_of_a_node() -> None:
    ranks = tuple(
        RankPlan(
            rank,
            (),
            (),
            (Peak("device", 70 * 10**9 + rank, "", "", (), 0), Peak("pageable host", 10**11, "", "", (), 0)),
            (FileRow("states", 10**12),),
        )
        for rank in (0, 15)
    )
    found = judge_fit(Plan(16, ranks), machine(node__host_memory="700 GB", disk__capacity="8 TB"))
    assert [(row.tier, row.needed) for row in found.rows] == [
        ("device", 70 * 10**9 + 15),
        ("host", 8 * 10**11),
        ("nvme", 8 * 10**12),
    ]
    assert not found
    assert str(found).split("; ")[1] == "host of a node does not fit, 100 GB too many: 800 GB of 700 GB"
    assert judge_fit(Plan(16, ranks), machine(node__host_memory="800 GB", disk__capacity="8 TB"))
    unknown = judge_fit(Plan(16, ranks), load_machine("h100-sxm-80gb-x8"))
    assert unknown.unknown == ("nvme",) and not unknown
    with pytest.raises(PlanError, match="expected at least one"):
        judge_fit(Plan(16, ()), machine())


def test_saves_and_loads_that_were_planned_have_to_fit_too() -> None:
    def peaks(device: int, host: int) -> tuple[Peak, ...]:
        return Peak("device", device, "", "", (), 0), Peak("pageable host", host, "", "", (), 0)

    steps = RankPlan(0, (), (), peaks(10, 5))
    assert steps.needs() == {"device": 10, "pageable host": 5}
    saved = replace(steps, saved=SavedPlan(peaks(12, 4), (), message_nbytes=3, copied_nbytes=100))
    assert saved.needs() == {"device": 12, "pageable host": 7 + 100}  # copies stay, also while steps run
    loaded = replace(saved, loaded=LoadedPlan(2, peaks(11, 6), 0, scratch_nbytes=8))
    assert loaded.needs() == {"device": 12, "pageable host": 14 + 100}
    assert replace(steps, saved=SavedPlan((), ())).needs() == steps.needs()


def _keys(section: object) -> list[str]:
    if not isinstance(section, dict):
        return []
    return [key for name, value in section.items() for key in (name, *_keys(value))]
