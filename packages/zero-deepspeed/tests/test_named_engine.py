"""The engine through DeepSpeed's names, where its semantics differ from `zero_core.Engine`."""

from __future__ import annotations

import argparse
import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from named_cases import BATCH, WIDTH, batch, build, settings, start, train
from torch import nn
from torch.distributed.fsdp import fully_shard

from zero_comm import run_ranks
from zero_core.errors import UsageError
from zero_deepspeed.construction import Init
from zero_deepspeed.cpu_optimizers import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion
from zero_deepspeed.engine import DeepSpeedEngine
from zero_deepspeed.errors import UnsupportedError
from zero_deepspeed.initialization import initialize
from zero_deepspeed.optimizer import DeepSpeedOptimizer
from zero_partition import PartitionError

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_training_is_that_of_torch_with_clipping_at_one(stage: int) -> None:
    engine = start(stage)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    expected = []
    for number in range(4):
        loss = model(batch(number) * 30)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((loss.item(), float(norm)))
    seen = []
    for number in range(4):
        loss = engine(batch(number) * 30)
        engine.backward(loss)
        engine.step()
        seen.append((loss.item(), engine.get_global_grad_norm()))
    assert max(norm for _, norm in expected) > 1.0
    assert torch.allclose(torch.tensor(seen), torch.tensor(expected), rtol=1e-5)


def test_the_four_results_and_the_raw_configuration(caplog: pytest.LogCaptureFixture) -> None:
    source = settings(2, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}})
    with caplog.at_level(logging.INFO, logger="DeepSpeed"):
        engine, optimizer, loader, scheduler = initialize(model=build(), config_params=source, training_data=[1.0] * 8)
    assert "DeepSpeed info" in caplog.text
    assert type(engine) is DeepSpeedEngine and engine.config is source
    assert optimizer is engine.optimizer and isinstance(optimizer, DeepSpeedOptimizer)
    assert loader is engine.training_dataloader and scheduler is engine.lr_scheduler
    assert optimizer.param_groups is engine.basic_optimizer.param_groups
    row = next(row for row in engine.resolved_config.report() if row.path == "gradient_clipping")
    assert (row.value, row.provenance) == (1.0, "dialect") and "DeepSpeed" in row.note
    assert "'gradient_clipping'" not in str(engine.config)


def test_the_configuration_may_come_from_arguments_a_file_or_base64(tmp_path: Path) -> None:
    import base64

    text = json.dumps(settings(1))
    (tmp_path / "ds.json").write_text(text)
    for source in (str(tmp_path / "ds.json"), base64.urlsafe_b64encode(text.encode()).decode()):
        engine = initialize(argparse.Namespace(deepspeed_config=source, device_rank=0), build())[0]
        assert engine.config == json.loads(text)
    with pytest.raises(UsageError, match="once"):
        initialize(argparse.Namespace(deepspeed_config="a"), build(), config=settings(1))
    with pytest.raises(ValueError, match="expected a dict"):
        initialize(model=build(), config="no such file")


def test_keys_of_older_templates_are_accepted_when_they_ask_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    idle = {
        "amp": {"enabled": False, "opt_level": "O1"},
        "elasticity": {"enabled": False},
        "sparse_gradients": False,
        "compression_training": {},
        "my_note": 1,
        "aio": {"thread_count": 2, "surprise": 1},
        "steps_per_print": float("inf"),
    }
    zero = {"stage": 2, "mics_shard_size": -1, "offload_param": {"device": "cpu"}, "reduce_bucket_size": 5e8}
    engine = start(2, zero_optimization=zero, **idle)
    assert train(engine, 0, 1)
    assert "my_note" in caplog.text and "aio.surprise" in caplog.text
    for key, value in (("amp", {"enabled": True}), ("sparse_gradients", True)):
        with pytest.raises(ValueError, match=key):
            start(2, **{key: value})


@pytest.mark.parametrize("schedule", ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"))
def test_no_warm_up_is_the_shortest_one(schedule: str) -> None:
    rates = []
    for steps in (0, 1):
        params = {"warmup_num_steps": steps, **({} if schedule == "WarmupLR" else {"total_num_steps": 10})}
        engine = start(1, scheduler={"type": schedule, "params": params})
        assert engine.config["scheduler"]["params"]["warmup_num_steps"] == steps
        train(engine, 0, 4)
        rates.append(engine.get_lr())
    assert rates[0] == rates[1] != [0.0]
    with pytest.raises(ValueError, match="warmup_num_steps"):
        start(1, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": -1}})


def test_accumulation_by_the_framework_and_learning_rates_written_into_groups() -> None:
    engine = start(1, gradient_accumulation_steps=4)
    seen = []
    for number in range(4):
        engine.set_gradient_accumulation_boundary(is_boundary=number % 2 == 1)
        engine.optimizer.param_groups[0]["lr"] = 0.0 if number < 2 else 1e-2
        before = engine.module.head.weight.clone()
        engine.backward(engine(batch(number)), scale_wrt_gas=False)
        engine.step()
        seen.append(bool((engine.module.head.weight != before).any()))
    assert seen == [False, False, False, True]
    assert engine.global_steps == 2 and not engine.optimizer.overflow


def test_no_sync_is_refused_above_stage_1_as_an_assertion() -> None:
    with start(1).no_sync():
        pass
    with pytest.raises(AssertionError, match="stage 2"), start(2).no_sync():
        pass


def test_overflow_is_seen_when_a_step_was_skipped() -> None:
    engine = start(2, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    model = engine.module
    engine.backward(model(batch(0).half()).float() * float("inf"))
    engine.step()
    assert engine.optimizer.overflow and engine.skipped_steps == 1 and engine.get_global_grad_norm() == 0.0
    engine.backward(model(batch(1).half()).float())
    engine.step()
    assert not engine.optimizer.overflow and engine.get_global_grad_norm() > 0


def test_the_optimizers_own_step_is_the_engines_without_the_schedule() -> None:
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}}}
    engine, named = start(2), start(2, **schedule)
    rates = []
    for number in range(3):
        for group in (*engine.optimizer.param_groups, *named.optimizer.param_groups):
            group["lr"] = 1e-2
        for each in (engine, named):
            each.backward(each(batch(number)))
        engine.step()
        named.optimizer.step()
        rates.append(named.optimizer.param_groups[0]["lr"])
    assert all(map(torch.equal, engine.module.parameters(), named.module.parameters()))
    assert rates == [1e-2] * 3 and named.global_steps == 3
    assert named.get_global_grad_norm() == engine.get_global_grad_norm()
    with pytest.raises(UsageError, match="closure"):
        named.optimizer.step(lambda: 0.0)


@pytest.mark.parametrize(
    ("stage", "inner", "masters"),
    [
        (2, "base_optimizer_state", "single_partition_of_fp32_groups"),
        (3, "optimizer_state_dict", "fp32_flat_groups"),
    ],
)
def test_the_optimizers_state_dict_has_deepspeeds_keys(stage: int, inner: str, masters: str) -> None:
    engine = start(stage, bf16={"enabled": True})

    def step() -> None:
        engine.backward(engine(batch(0).bfloat16()))
        engine.step()

    step()
    saved = copy.deepcopy(engine.optimizer.state_dict())
    assert saved["zero_stage"] == stage and saved["partition_count"] == 1 and not saved["overflow"]
    assert sum(master.numel() for master in saved[masters]) >= sum(p.numel() for p in engine.module.parameters())
    assert {master.dtype for master in saved[masters]} == {torch.float32}
    step()
    assert engine.optimizer.state_dict()[inner]["state"][0]["step"] == saved[inner]["state"][0]["step"] + 1
    engine.optimizer.load_state_dict(saved)
    assert engine.optimizer.state_dict()[inner]["state"][0]["step"] == saved[inner]["state"][0]["step"]
    with pytest.raises(UsageError, match=f"expected '{inner}'"):
        engine.optimizer.load_state_dict(saved[inner])


def test_a_half_loss_is_divided_by_the_accumulation_steps_before_the_scale_makes_it_infinite() -> None:
    engine = start(2, fp16={"enabled": True}, gradient_accumulation_steps=2)
    for number in range(2):
        loss = engine(batch(number).half())
        assert loss.dtype == torch.float16 and engine.backward(loss).dtype == torch.float16
        engine.step()
    assert engine.was_step_applied()


def test_a_new_engine_takes_the_model_over() -> None:
    model = build()
    first = start(3, model)
    train(first, 0, 1)
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    second = start(3, model)
    assert all(torch.equal(trained[name], p) for name, p in second.module.named_parameters())
    second.destroy()
    assert all(type(p) is nn.Parameter and not hasattr(p, "ds_id") for p in model.parameters())


def test_an_engine_without_an_optimizer_evaluates() -> None:
    training = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    engine, optimizer, _, scheduler = initialize(
        model=build(),
        model_parameters=[],
        lr_scheduler=lambda _: pytest.fail("a schedule without an optimizer"),
        config={"train_batch_size": 1, "zero_optimization": {"stage": 3}, **training},
    )
    assert scheduler is None and engine.config["scheduler"] == training["scheduler"]
    assert optimizer is engine.optimizer and [hook.remove for hook in optimizer.forward_hooks]
    assert engine.eval()(batch(0)).item() == build()(batch(0)).item()


def test_what_is_not_available_is_refused_by_name() -> None:
    mesh: Any = (1, 2)
    with pytest.raises(UnsupportedError, match=r"mesh_param\[1\]"):
        initialize(model=build(), config=settings(1), mesh_param=mesh)
    for argument in ("zero_param_parallel_group", "zero_quantized_weights", "param_swapper"):
        with pytest.raises(UnsupportedError, match=argument):
            Init(**{argument: True})


@pytest.mark.parametrize("kind", (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion))
def test_cpu_optimizers_share_the_groups_of_the_optimizer_that_they_replace(kind: Any) -> None:
    model = build()
    theirs = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.9))
    ours = kind(theirs.param_groups, lr=3e-3)
    assert ours.param_groups[0] is theirs.param_groups[0]
    engine = initialize(
        model=model, optimizer=ours, config={"train_batch_size": BATCH, "zero_optimization": {"stage": 2}}
    )[0]
    theirs.param_groups[0]["lr"] = 0.0
    before = model.head.weight.clone()
    theirs.param_groups[0]["weight_decay"] = 0.0
    train(engine, 0, 1)
    assert torch.equal(model.head.weight, before)
    theirs.param_groups[0]["lr"] = 1e-2
    train(engine, 1, 2)
    assert not torch.equal(model.head.weight, before)


def test_deepspeed_io_makes_a_loader_of_this_ranks_samples() -> None:
    engine = start(1)
    loader = engine.deepspeed_io([torch.full((WIDTH,), float(n)) for n in range(2 * BATCH)], route="eval")
    assert [rows[:, 0].tolist() for rows in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def wrapped() -> list[str]:
    found = []
    for stage in (0, 3):
        engine = start(stage)
        for wrap in (nn.parallel.DistributedDataParallel, nn.DataParallel, fully_shard):
            with pytest.raises(PartitionError) as refused:
                wrap(engine)
            found.append(str(refused.value))
        train(engine, 0, 1)
        engine.destroy()
    return found


def test_torchs_wrappers_around_an_engine_are_refused_by_name() -> None:
    for refusals in run_ranks(wrapped, 2):
        for wrapper, refusal in zip(
            ["DistributedDataParallel", "DataParallel", "fully_shard"] * 2, refusals, strict=True
        ):
            assert refusal.startswith(wrapper), refusal


@pytest.mark.parametrize(
    ("stage", "section", "same"), [(0, {}, True), (0, {"bf16": {"enabled": True}}, False), (1, {}, False)]
)
def test_the_scripts_optimizer_is_returned_where_nothing_wraps_it(stage: int, section: Any, same: bool) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {key: value for key, value in settings(stage).items() if key != "optimizer"} | {"gradient_clipping": 0.0}
    dtype = torch.bfloat16 if section else torch.float32
    engine, returned, *_ = initialize(model=model, optimizer=optimizer, config={**config, **section})
    assert (returned is optimizer) == same and engine.optimizer is returned
    plain = build()
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        engine.backward(engine(batch(step).to(dtype)))
        engine.step()
        returned.zero_grad()
        plain(batch(step)).backward()
        expected.step()
        expected.zero_grad()
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(engine.full_param(ours).float(), theirs, atol=1e-6 if not section else 2e-2)
    if same:
        with pytest.raises(PartitionError, match=r"Call engine.step\(\)"):
            returned.step()
