"""Values that DeepSpeed accepts in a configuration and the engine's own name does not, and other ways to write them."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from named_cases import batch, build, settings, train
from torch import nn

from zero_comm import run_ranks
from zero_deepspeed.configuration import DeepSpeedZeroConfig
from zero_deepspeed.initialization import initialize
from zero_deepspeed.leaf_modules import get_z3_leaf_modules, z3_leaf_module
from zero_deepspeed.settings import load_config
from zero_partition import PartitionError
from zero_settings import Config, ConfigError

MICRO = {"train_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    ("sections", "given", "kept"),
    [
        ({}, "bf16", None),
        ({}, "fp32", "fp32"),
        ({"fp16": {"enabled": True}}, "bf16", None),
        ({"fp16": {"enabled": True}}, "fp16", "fp16"),
        ({"bf16": {"enabled": "true"}}, "bf16", "bf16"),
    ],
)
def test_a_dtype_of_accumulation_that_holds_less_is_said_and_not_used(
    sections: dict[str, Any], given: str, kept: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config({**MICRO, **sections, "data_types": {"grad_accum_dtype": given}}, 1)
    assert config.data_types.grad_accum_dtype == kept
    assert ("grad_accum_dtype" in caplog.text) == (kept is None)


@pytest.mark.parametrize(
    ("given", "path", "value"),
    [
        ({"zero_allow_untested_optimizer": 1}, "zero_allow_untested_optimizer", True),
        ({"bf16": {"enabled": "true"}}, "bf16.enabled", True),
        ({"fp16": {"enabled": "off", "initial_scale_power": "12"}}, "fp16.initial_scale_power", 12),
        ({"zero_optimization": {"overlap_comm": 0}}, "zero_optimization.overlap_comm", False),
        ({"zero_optimization": {"stage3_prefetch_bucket_size": "5e7"}}, None, None),
        ({"zero_optimization": {"reduce_bucket_size": "1000"}}, "zero_optimization.reduce_bucket_size", 1000),
        ({"zero_optimization": {"prefetch_bucket_size": "7"}}, "zero_optimization.stage3_prefetch_bucket_size", 7),
        (
            {"zero_optimization": {"leaf_module": {"name_suffixes": "tail"}}},
            "zero_optimization.leaf_module.name_suffixes",
            ("tail",),
        ),
        ({"checkpoint": {"load_universal": 1}}, "checkpoint.load_universal", True),
        ({"torch_autocast": {"enabled": 0}}, "torch_autocast.enabled", False),
        ({"comms_logger": {"prof_all": "no"}}, "comms_logger.prof_all", False),
        ({"gradient_clipping": "0.5"}, None, None),
        ({"prescale_gradients": "false"}, None, None),
        ({"steps_per_print": "10"}, None, None),
        ({"flops_profiler": {"profile_step": "2"}}, None, None),
        ({"checkpoint": {"load_universal": "false"}}, None, None),
        ({"comms_logger": {"prof_ops": "all_reduce"}}, None, None),
        ({"checkpoint": {"tag_validation": "IGNORE"}}, "checkpoint.tag_validation", "Ignore"),
        ({"gradient_allreduce_op": "SUM"}, "gradient_allreduce_op", "sum"),
        ({"zero_allow_untested_optimizer": 2}, None, None),
        ({"bf16": {"enabled": "perhaps"}}, None, None),
        ({"gradient_clipping": True}, None, None),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, None, None),
    ],
)
def test_values_are_converted_as_deepspeed_does_or_refused(given: dict[str, Any], path: str | None, value: Any) -> None:
    if path is None:
        with pytest.raises(ConfigError):
            load_config({**MICRO, **given}, 1)
        return
    resolved: Any = load_config({**MICRO, **given}, 1)
    for name in path.split("."):
        resolved = getattr(resolved, name)
    assert resolved == value and type(resolved) is type(value)


def test_the_engines_own_name_stays_strict() -> None:
    with pytest.raises(ConfigError, match="zero_allow_untested_optimizer"):
        Config.load({**MICRO, "zero_allow_untested_optimizer": 1}, world_size=1)


def test_a_schema_for_editors_is_no_setting(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config({**MICRO, "$schema": "zero.schema.json"}, 1)
        Config.load({**MICRO, "$schema": "zero.schema.json"}, world_size=1)
    assert not caplog.messages and "$schema" in Config.json_schema()["properties"]


def test_the_section_for_zero_answers_by_both_names_of_a_key() -> None:
    section = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=5, offload_param={"device": "cpu"})
    assert (section.stage, section.prefetch_bucket_size, section.stage3_prefetch_bucket_size) == (3, 5, 5)
    assert section.offload_param.device == "cpu" and section.offload_optimizer is None
    assert DeepSpeedZeroConfig(param_persistence_threshold=9).stage3_param_persistence_threshold == 9
    with pytest.raises(ConfigError, match="stagee"):
        DeepSpeedZeroConfig(stagee=3)
    with pytest.raises(AttributeError):
        DeepSpeedZeroConfig().no_such_key  # noqa: B018


@pytest.mark.usefixtures("alone")
def test_leaves_of_the_configuration_are_reported() -> None:
    zero = {"leaf_module": {"classes": ["Linear"], "names": [], "name_suffixes": "head"}}
    model = build()
    initialize(model=model, config=settings(3, zero_optimization={"stage": 3, **zero}))
    assert get_z3_leaf_modules(model) == [*model.blocks, model.head]
    assert not z3_leaf_module(model)


@pytest.mark.usefixtures("alone")
def test_the_older_argument_names_a_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(settings(1)))
    arguments = argparse.Namespace(deepscale_config=str(tmp_path / "ds.json"))
    assert initialize(arguments, build())[0].config == settings(1)
    assert "deprecated" in caplog.text


def cast(mode: str, auto_cast: bool) -> str:
    engine = initialize(model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), config=half(mode, auto_cast))[0]
    try:
        return str(engine(torch.ones(2, 4)).dtype)
    except PartitionError as error:
        return str(error)


def half(mode: str, auto_cast: bool) -> dict[str, Any]:
    return {**settings(3), mode: {"enabled": True, "auto_cast": auto_cast}}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_inputs_of_another_dtype_are_cast_or_the_module_and_the_key_are_named(mode: str) -> None:
    dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[mode]
    assert cast(mode, True) == dtype
    refusal = cast(mode, False)
    for word in ("forward of '0' (Linear)", dtype, "torch.float32", f"{mode}.auto_cast", "torch says"):
        assert word in refusal, refusal


def summed(stage: int, operation: str, mics: bool) -> list[torch.Tensor]:
    zero = {"stage": stage, **({"mics_shard_size": 1} if mics else {})}
    config = {"gradient_allreduce_op": operation, "gradient_clipping": 0.0, "data_types": {"param_dtype": "fp64"}}
    plain = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": zero}
    engine = initialize(model=build().double(), config=settings(stage, **config, **plain))[0]
    for number in range(3):
        engine.backward(engine(batch(number).double()))
        engine.step()
    return [engine.full_param(parameter) for parameter in engine.module.parameters()]


def plain(ranks: int, factor: int) -> list[torch.Tensor]:
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        (model(batch(number).double()) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("stage", "mics"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
def test_gradients_are_summed_where_that_is_asked(stage: int, mics: bool) -> None:
    expected = plain(2, 2)
    for weights in run_ranks(summed, 2, stage, "sum", mics):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize(
    "more",
    [
        {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}},
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}},
        {"deterministic": {"across_world_sizes": 2}},
    ],
)
def test_what_averages_by_itself_does_not_sum(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="gradient_allreduce_op"):
        load_config({**MICRO, "gradient_allreduce_op": "sum", **more}, 2)


@pytest.mark.usefixtures("alone")
def test_training_goes_on_as_with_other_ways_of_writing() -> None:
    plain_way, other_way = settings(2), settings(2)
    other_way["zero_optimization"] = {**other_way["zero_optimization"], "stage": 2, "overlap_comm": "1"}
    losses = [train(initialize(model=build(), config=config)[0], 0, 3) for config in (plain_way, other_way)]
    assert losses[0] == losses[1]
