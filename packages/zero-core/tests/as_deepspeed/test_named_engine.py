"""The engine through DeepSpeed's names, where its semantics differ from `zero_core.Engine`."""

from __future__ import annotations

import argparse
import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from named_cases import BATCH, WIDTH, Net, batch, build, settings, start, train
from torch import nn

from zero_ckpt import CheckpointError, verify
from zero_ckpt.zero_to_fp32 import convert_zero_checkpoint_to_state_dict
from zero_comm import run_ranks
from zero_core.as_deepspeed import VERSION
from zero_core.as_deepspeed.communication import init_distributed
from zero_core.as_deepspeed.construction import GatheredParameters, Init, unwrap_model_for_generation
from zero_core.as_deepspeed.cpu_optimizers import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion
from zero_core.as_deepspeed.engine import DeepSpeedEngine, initialize
from zero_core.as_deepspeed.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
    safe_update_full_grad_vectorized,
)
from zero_core.as_deepspeed.leaf_modules import set_z3_leaf_modules, z3_leaf_module
from zero_core.as_deepspeed.naming import UnsupportedError
from zero_core.as_deepspeed.optimizer import DeepSpeedOptimizer
from zero_core.as_deepspeed.parameters import ZeroParamStatus
from zero_core.as_deepspeed.state_files import get_model_state_file, get_optim_files
from zero_core.config import ConfigError
from zero_core.errors import UsageError

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
        assert loss.dtype == torch.float16 and engine.backward(loss).dtype == torch.float32
        engine.step()
    assert engine.was_step_applied()


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


def named_parameters(_: int) -> dict[str, Any]:
    unresolved = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}
    with Init(config_dict_or_path=unresolved):
        torch.manual_seed(0)
        model = Net()
    weight = model.blocks[0].weight
    seen: dict[str, Any] = {"built": (weight.ds_numel, tuple(weight.ds_shape), weight.ds_status.name)}
    seen["copied"] = [copy.deepcopy(model).blocks[0].weight]
    with GatheredParameters({*model.parameters(), None}, modifier_rank=None):
        if dist.get_rank() == 1:
            seen["copied"] += [copy.deepcopy(weight)]
        seen["whole"] = weight.detach().clone()
        seen["inside"] = weight.ds_status.name
    with GatheredParameters([model.head.weight, None], modifier_rank=1), torch.no_grad():
        model.head.weight.fill_(dist.get_rank())
    engine = start(3, model)
    seen["owned"] = (weight.ds_status.name, weight.ds_tensor.numel(), weight.partition_numel())
    seen["ids"] = [p.ds_id for p in model.parameters()]
    seen["head"] = safe_get_full_fp32_param(model.head.weight)
    engine.backward(engine(batch(0)))
    gradient = safe_get_full_grad(weight)
    safe_update_full_grad_vectorized([weight], lambda g, p: g * 0)
    seen["gradient"] = (gradient.abs().sum().item() > 0, safe_get_full_grad(weight).abs().sum().item())
    local = safe_get_local_grad(weight)
    seen["local"] = (local.numel(), weight.ds_tensor.numel())
    engine.step()
    seen["state"] = safe_get_full_optimizer_state(weight, "exp_avg").abs().sum().item()
    seen["local state"] = safe_get_local_optimizer_state(model.head.weight, "exp_avg").shape
    part = safe_get_local_fp32_param(weight)
    safe_set_local_fp32_param(weight, torch.full_like(part, 2.0))
    seen["set"] = bool((safe_get_full_fp32_param(weight) == 2.0).all())
    safe_set_full_fp32_param(weight, torch.full(weight.ds_shape, 3.0))
    with GatheredParameters(weight):
        seen["set whole"] = bool((weight == 3.0).all())
    weight.all_gather()
    seen["gathered"] = (weight.ds_status.name, weight.sum().isnan().item())
    weight.partition()
    copied = copy.deepcopy(weight)
    seen["copies"] = (
        type(copied).__name__,
        bool((copied == 3.0).all()),
        type(pickle.loads(pickle.dumps(weight))).__name__,
    )
    with unwrap_model_for_generation(engine) as plain:
        seen["calls"] = [plain(batch(0)).isnan().item() for _ in range(1 + dist.get_rank())]
    seen["by hand"] = without_hooks(engine)
    seen["after"] = train(engine, 0, 1)
    return seen


def built_in_parts(_: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("note", torch.float32)):
        config = {"zero_optimization": {"stage": 3}, section: {"enabled": True}}
        model = build()
        Init(module=model, config_dict_or_path=config, data_parallel_group=dist.group.WORLD)
        with Init(config_dict_or_path=config):
            torch.manual_seed(0)
            other = Net()
        for made in (model, other):
            weight: Any = made.blocks[0].weight
            status = weight.ds_status.name
            assert {p.dtype for p in made.parameters()} == {dtype} and (
                dist.get_world_size() == 1 or weight.isnan().all()
            )
            with GatheredParameters(list(made.parameters())):
                assert torch.equal(weight, build().blocks[0].weight.to(dtype)) and status == "NOT_AVAILABLE"
        if section != "note":
            engine = start(3, model, **{section: {"enabled": True}})
            seen[section] = engine(batch(0).to(dtype)).dtype
    return seen


def test_models_are_cut_afterwards_too_and_have_the_configurations_dtype() -> None:
    init_distributed()
    for seen in (built_in_parts(0), *run_ranks(built_in_parts, 2, 0)):
        assert seen == {"bf16": torch.bfloat16, "fp16": torch.float16}


def without_hooks(engine: DeepSpeedEngine) -> list[bool]:
    """Generation as frameworks on top of Transformers do it: gather everything, take the hooks away, put them back."""
    offload = engine.optimizer.parameter_offload
    with GatheredParameters(engine.module.parameters()):
        for _, parameter in [*offload.module.named_parameters(), *offload.module.ds_external_parameters()]:
            parameter.ds_active_sub_modules.clear()
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        seen = [engine.module(batch(0)).isnan().item() for _ in range(2 - dist.get_rank())]
        offload._register_deepspeed_module(offload.module)
    return seen


def test_an_init_that_was_refused_is_not_open_afterwards() -> None:
    with pytest.raises(ConfigError), Init(config_dict_or_path=settings(3, bf16={"enabled": "yes please"})):
        build()
    with Init(config_dict_or_path=settings(3)):
        model = build()
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    assert not any(hasattr(parameter, "ds_id") for parameter in build().parameters())


def test_parameters_answer_to_deepspeeds_names_on_two_ranks() -> None:
    first, second = run_ranks(named_parameters, 2, 0)
    torch.manual_seed(0)
    expected = Net()
    for seen in (first, second):
        assert seen["built"] == (WIDTH * WIDTH, (WIDTH, WIDTH), "NOT_AVAILABLE") and seen["inside"] == "AVAILABLE"
        assert torch.equal(seen["whole"], expected.blocks[0].weight)
        status, _, share = seen["owned"]
        assert (status, share) == ("NOT_AVAILABLE", WIDTH * WIDTH // 2)
        assert (seen["head"] == 1.0).all()
        assert seen["gradient"] == (True, 0.0) and seen["state"] == 0.0
        assert seen["local"][0] == seen["local"][1]
        assert seen["set"] and seen["set whole"] and seen["gathered"] == ("AVAILABLE", False)
        assert seen["copies"] == ("Parameter", True, "Parameter")
        assert all(torch.equal(copied, seen["whole"]) for copied in seen["copied"])
        assert not any(seen["calls"]) and not any(seen["by hand"])
    assert first["ids"] == second["ids"]
    assert first["owned"][1] + second["owned"][1] == WIDTH * WIDTH


def test_one_rank_says_not_available_outside_of_a_gather() -> None:
    engine = start(3)
    weight: Any = engine.module.head.weight
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with GatheredParameters([weight]):
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
    assert weight.ds_summary()["ds_shape"] == (1, WIDTH)


def test_leaf_modules_are_marked_and_found() -> None:
    model = build()
    assert set_z3_leaf_modules(model, [nn.ModuleList]) == [model.blocks]
    assert z3_leaf_module(model.blocks) and model.blocks._z3_leaf is True and not z3_leaf_module(model)
    with pytest.raises(ValueError, match="no module"):
        set_z3_leaf_modules(model, ["Conv2d"])
    assert train(start(3, model), 0, 1)
