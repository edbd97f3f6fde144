from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_precision import DynamicLossScale, NoLossScale, PrecisionError, PrecisionPolicy, StaticLossScale, kept_in_fp32
from zero_settings import ConfigError, autocast_modules, loss_scale, precision_policy

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
STAGE_1 = {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({}, PrecisionPolicy.full()),
        ({"bf16": {"enabled": True}}, PrecisionPolicy.bf16()),
        ({"fp16": {"enabled": True}}, PrecisionPolicy.fp16()),
        ({"torch_autocast": {"enabled": True}}, PrecisionPolicy.full()),
        ({"data_types": {"param_dtype": "fp64"}}, PrecisionPolicy.full(FP64)),
        ({"data_types": {"param_dtype": "float64"}, "communication_data_type": "fp32"},
         PrecisionPolicy.full(FP64, wire_dtype=FP32)),
        ({"bf16": {"enabled": True}, "communication_data_type": "torch.float32"},
         PrecisionPolicy.bf16(wire_dtype=FP32)),
        ({"fp16": {"enabled": True}, "data_types": {"buffer_dtype": "fp16", "param_dtype": "half"}},
         PrecisionPolicy.fp16(buffer_dtype=FP16)),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
         PrecisionPolicy.bf16(accumulate_dtype=BF16)),
        ({"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["norm"]}},
         PrecisionPolicy.bf16(keep_fp32=["norm"], keep_declared_fp32=False)),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **STAGE_1},
         PrecisionPolicy.pure_bf16(state_dtype=FP32)),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, **STAGE_1},
         PrecisionPolicy.pure_bf16()),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **STAGE_1,
          "data_types": {"grad_accum_dtype": "fp32"}},
         PrecisionPolicy.pure_bf16(state_dtype=FP32, accumulate_dtype=FP32)),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, **STAGE_1},
         PrecisionPolicy.fp16(master_dtype=None, accumulate_dtype=FP16)),
    ],
)  # fmt: skip
def test_the_policy_follows_the_precision_keys(config, policy, loaded):
    assert precision_policy(loaded(config)) == policy


def test_the_loss_scale_is_none_static_or_dynamic(loaded):
    assert isinstance(loss_scale(loaded({})), NoLossScale)
    assert isinstance(loss_scale(loaded({"bf16": {"enabled": True}, "fp16": {"loss_scale": 128}})), NoLossScale)
    static = loss_scale(loaded({"fp16": {"enabled": True, "loss_scale": 128}}))
    assert isinstance(static, StaticLossScale) and static.scale == 128.0


@pytest.mark.parametrize("mode", [{"fp16": {}}, {"torch_autocast": {"enabled": True, "dtype": "float16"}}])
def test_the_dynamic_scale_has_the_configured_start_window_hysteresis_and_minimum(mode, loaded):
    fp16 = {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 4}
    scale = loss_scale(loaded({**mode, "fp16": {**fp16, "enabled": "fp16" in mode}}))
    assert isinstance(scale, DynamicLossScale) and scale.scale == 16.0
    assert [scale.update(False) and scale.scale for _ in range(3)] == [16.0, 16.0, 32.0]
    for expected in (16.0, 8.0, 4.0):
        scale.update(True)
        assert scale.scale == expected
    with pytest.raises(PrecisionError, match="minimum"):
        scale.update(True)


class Model(nn.Module):
    _keep_in_fp32_modules = ("norm",)

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(2), nn.Linear(2, 2)


def test_modules_kept_in_fp32_are_those_of_the_user_or_of_the_model(loaded):
    def kept(mode, patterns="auto"):
        config = loaded({mode: {"enabled": True}, "data_types": {"keep_in_fp32_modules": patterns}})
        return kept_in_fp32(Model(), precision_policy(config))

    norm = {"norm.weight", "norm.bias"}
    assert kept("fp16") == norm and kept("bf16") == frozenset() and kept("torch_autocast") == frozenset()
    assert kept("fp16", []) == frozenset() and kept("bf16", ["norm"]) == norm
    with pytest.raises(PrecisionError, match="'lnear'.*'linear'"):
        kept("bf16", ["lnear"])


def test_autocast_modules_are_classes_by_full_name(loaded):
    names = ["torch.nn.Linear", "torch.nn.modules.conv.Conv2d"]
    config = loaded({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": names}})
    assert autocast_modules(config) == (nn.Linear, nn.Conv2d)
    assert autocast_modules(loaded({"torch_autocast": {"enabled": True}})) is None
    assert loaded({"torch_autocast": {"enabled": True}}).torch_autocast.dtype == "bf16"


@pytest.mark.parametrize("name", ["torch.nn.Linaer", "nowhere.Linear", "torch.nn.functional.linear", "Linear", ""])
def test_a_name_that_is_no_module_class_is_refused_by_position(name, loaded):
    config = loaded({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear", name]}})
    with pytest.raises(ConfigError) as caught:
        autocast_modules(config)
    assert caught.value.path == "torch_autocast.lower_precision_safe_modules[1]"
