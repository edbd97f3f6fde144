"""Modules that scripts import from DeepSpeed besides the engine: monitors, builders, schedules, the accelerator."""

from __future__ import annotations

import argparse
import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from named_cases import WIDTH, batch, build, settings, train
from torch import nn

from zero_core.errors import UsageError
from zero_deepspeed import schedule_words
from zero_deepspeed.accelerator import get_accelerator, is_current_accelerator_supported
from zero_deepspeed.compat import required_torch_version
from zero_deepspeed.construction import Init
from zero_deepspeed.cpu_optimizers import DeepSpeedCPUAdam
from zero_deepspeed.engine import StageError
from zero_deepspeed.errors import UnsupportedError
from zero_deepspeed.expert_words import split_params_into_different_moe_groups_for_optimizer
from zero_deepspeed.fragments import (
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
)
from zero_deepspeed.helpers import register_grad_hook
from zero_deepspeed.initialization import initialize
from zero_deepspeed.monitor import MonitorMaster, csvMonitor, get_monitor_config
from zero_deepspeed.op_builders import CPUAdamBuilder, QuantizerBuilder
from zero_deepspeed.report import COMPATIBLE, TORCH_INFO
from zero_deepspeed.universal import main, parse_arguments
from zero_optim import OneCycle, WarmupCosineLR, WarmupLR

pytestmark = pytest.mark.usefixtures("alone")


def test_a_monitor_writes_what_a_script_gives_it(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    config = get_monitor_config({"csv_monitor": section, "train_batch_size": 8})
    assert config.enabled and config.csv_monitor.job_name == "run" and not config.tensorboard.enabled
    MonitorMaster(config).write_events([("Train/loss", 0.5, 8), ("Train/loss", 0.25, 16)])
    csvMonitor({**section, "job_name": "other"}).write_events([("Train/loss", 1.0, 8)])
    with (tmp_path / "run" / "Train_loss.csv").open() as file:
        assert list(csv.reader(file)) == [["step", "loss"], ["8", "0.5"], ["16", "0.25"]]
    assert (tmp_path / "other" / "Train_loss.csv").is_file()
    assert not get_monitor_config({}).enabled
    MonitorMaster(get_monitor_config({})).write_events([("Train/loss", 0.5, 8)])
    csvMonitor({**section, "enabled": False, "job_name": "idle"}).write_events([("Train/loss", 1.0, 8)])
    assert not (tmp_path / "idle").exists()


def test_groups_with_experts_of_deepspeed_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.allreduce = False  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="allreduce=False"):
        split_params_into_different_moe_groups_for_optimizer({"params": [weight]})


def test_builders_say_what_does_their_work() -> None:
    assert CPUAdamBuilder().is_compatible() and COMPATIBLE[CPUAdamBuilder.NAME]
    assert not QuantizerBuilder().is_compatible()
    for call in (CPUAdamBuilder().load, CPUAdamBuilder().builder):
        with pytest.raises(UnsupportedError, match="DeepSpeedCPUAdam"):
            call()


def test_facts_about_torch_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_current_accelerator_supported() and torch.__version__.startswith(str(TORCH_INFO["version"]))
    assert required_torch_version(min_version=1.8) and not required_torch_version(max_version="1.8")
    assert required_torch_version(min_version="2.8", max_version="1000")
    with pytest.raises(UsageError, match="min_version, max_version or both"):
        required_torch_version()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert get_accelerator().device_count() == 3
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert get_accelerator().device_count() == 2
    for nothing in ("0", "", "-1", "many"):
        monkeypatch.setenv("LOCAL_SIZE", nothing)
        assert get_accelerator().device_count() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert get_accelerator().device_count() == 1


def test_a_gradient_hook_is_called_until_it_is_removed() -> None:
    parameter, seen = nn.Parameter(torch.ones(2)), []
    handle = register_grad_hook(parameter, lambda p: seen.append(p.grad.clone()))
    (parameter * 3).sum().backward()
    handle.remove()
    (parameter * 3).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], torch.full((2,), 3.0))


def test_every_word_of_schedules_is_a_name_or_an_argument() -> None:
    import inspect

    import zero_optim

    words = {name: value for name, value in vars(schedule_words).items() if name.isupper()}
    schedules = [getattr(zero_optim, name) for name in zero_optim.schedules.VALID_LR_SCHEDULES]
    arguments = {argument for schedule in schedules for argument in inspect.signature(schedule).parameters}
    known = {*arguments, *zero_optim.schedules.VALID_LR_SCHEDULES, "lr_schedule", "log", "linear"}
    assert set(words.values()) <= known and schedule_words.WARMUP_NUM_STEPS == "warmup_num_steps"


def optimizer(lr: Any = 0.1) -> torch.optim.Optimizer:
    return torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=lr)


def test_schedules_show_their_shape(caplog: pytest.LogCaptureFixture) -> None:
    cycle = OneCycle(optimizer(), 0.1, 0.2, cycle_first_step_size=3, cycle_second_step_size=1)
    cycle.step()
    assert (cycle.total_size, cycle.step_ratio, cycle.first_step_size, cycle.second_step_size) == (4, 0.75, 3, 1)
    assert cycle.get_mom() == [cycle.optimizer.param_groups[0]["betas"]]
    assert OneCycle(torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1), 0.1, 0.2).get_mom() is None
    assert (WarmupLR(optimizer(), warmup_num_steps=5).warmup_num_steps, WarmupLR(optimizer()).warmup_type) == (5, "log")
    assert WarmupCosineLR(optimizer(), 100, warmup_num_steps=1).warmup_num_steps == 2
    caplog.clear()
    assert WarmupLR(optimizer(), warmup_type="steep").warmup_type == "log"
    assert "warmup_type: expected 'log' or 'linear', got 'steep'" in caplog.text


@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor([0.1])])
def test_a_rate_that_is_a_tensor_is_written_in_place(lr: torch.Tensor) -> None:
    given = optimizer(lr)
    schedule = WarmupLR(given, warmup_num_steps=4, warmup_type="linear")
    schedule.step()
    schedule.step()
    assert given.param_groups[0]["lr"] is lr and torch.allclose(lr, torch.full_like(lr, 0.025))


def test_a_schedule_over_another_optimizer_would_change_nothing_and_is_refused() -> None:
    with pytest.raises(UsageError, match="drives other param groups than those of the engine's optimizer"):
        initialize(model=build(), config=settings(1), lr_scheduler=WarmupLR(optimizer(1.0)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_and_gradients_of_frozen_parameters_are_none(stage: int) -> None:
    model = build()
    model.blocks[0].weight.requires_grad_(False)
    frozen, trained = model.blocks[0].weight, model.blocks[1].weight
    engine = initialize(model=model, config=settings(stage))[0]
    engine.backward(engine(batch(0)))
    assert safe_get_full_grad(frozen) is None and safe_get_full_grad(trained).shape == (WIDTH, WIDTH)
    engine.step()
    assert safe_get_full_optimizer_state(frozen, "exp_avg") is None
    assert safe_get_full_optimizer_state(trained, "exp_avg").shape == (WIDTH, WIDTH)
    safe_set_full_optimizer_state(frozen, torch.ones(WIDTH, WIDTH), "exp_avg")
    assert safe_get_full_optimizer_state(frozen, "exp_avg") is None


@pytest.mark.parametrize("block", ["no_sync", "coalesce_grad_reduction"])
def test_blocks_of_accumulation_are_not_nested_and_hold_no_step(block: str) -> None:
    engine = initialize(model=build(), config=settings(1))[0]
    with getattr(engine, block)():
        for inner in ("no_sync", "coalesce_grad_reduction"):
            with pytest.raises(StageError, match="cannot be nested"), getattr(engine, inner)():
                pass
        engine.backward(engine(batch(0)))
        with pytest.raises(AssertionError, match="leave the block first"):
            engine.step()
    engine.backward(engine(batch(1)))
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_passes_that_are_coalesced_are_one_step(stage: int) -> None:
    zero = settings(stage, gradient_clipping=0.0, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine = initialize(model=build(), config=zero)[0]
    with engine.coalesce_grad_reduction():
        engine.backward(engine(batch(0)))
        engine.backward(engine(batch(1)))
    engine.step()
    model = build()
    (model(batch(0)) + model(batch(1))).backward()
    for parameter, expected in zip(engine.module.parameters(), model.parameters(), strict=True):
        assert torch.allclose(engine.full_param(parameter), expected - 0.1 * expected.grad, atol=1e-6)


def test_coalescing_at_stage_0_is_refused_by_name() -> None:
    engine = initialize(model=build(), config=settings(0))[0]
    with pytest.raises(UnsupportedError, match="use no_sync"), engine.coalesce_grad_reduction():
        pass


def test_two_values_of_eps_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"eps=\(1e-30, 0.001\).*Adafactor"):
        DeepSpeedCPUAdam(build().parameters(), eps=(1e-30, 1e-3))
    replaced = torch.optim.Adafactor(build().parameters())  # a framework hands on the param groups
    with pytest.raises(UsageError, match=r"eps=\(None, 0.001\).*Adafactor.*zero_force_ds_cpu_optimizer"):
        DeepSpeedCPUAdam(replaced.param_groups, lr=1e-3)


def test_another_optimizer_that_is_replaced_by_adam_is_said(caplog: pytest.LogCaptureFixture) -> None:
    replaced = torch.optim.RMSprop(build().parameters())
    DeepSpeedCPUAdam(replaced.param_groups, lr=1e-3)
    assert "options of another optimizer (alpha, centered, momentum)" in caplog.text
    caplog.clear()
    DeepSpeedCPUAdam(torch.optim.AdamW(build().parameters()).param_groups, lr=1e-3)
    assert not caplog.records


def test_a_model_of_mics_is_built_and_trained(tmp_path: Path) -> None:
    config = settings(3, zero_optimization={"stage": 3, "mics_shard_size": 1})
    with Init(config_dict_or_path=config):
        model = build()
    engine = initialize(model=model, config=config)[0]
    assert train(engine, 0, 2) == train(initialize(model=build(), config=settings(3))[0], 0, 2)


def test_a_checkpoint_is_made_universal_by_deepspeeds_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = initialize(model=build(), config=settings(2))[0]
    train(engine, 0, 2)
    engine.save_checkpoint(str(tmp_path / "run"), "one")
    command = ["--input_folder", str(tmp_path / "run" / "one"), "--output_folder", str(tmp_path / "run" / "universal")]
    with caplog.at_level(logging.INFO, logger="DeepSpeed"):
        main(parse_arguments(command))
    assert isinstance(parse_arguments(command), argparse.Namespace) and "wrote" in caplog.text
    assert (tmp_path / "run" / "universal" / "zero" / "head.weight" / "fp32.pt").is_file()
    assert (tmp_path / "run" / "latest_universal").read_text() == "universal"
    assert not list((tmp_path / "run").glob(".*unfinished"))
    with pytest.raises(UsageError, match="exists already"):
        main(parse_arguments(command))
