from __future__ import annotations

import importlib
import inspect

import pytest

from zero_settings import _optim_keys, _parallel_keys, _precision_keys, _tool_keys, _zero_keys

pytestmark = pytest.mark.peer

PAIRS = [
    ("runtime.precision_config.DeepSpeedFP16Config", _precision_keys.Fp16),
    ("runtime.precision_config.DeepSpeedBF16Config", _precision_keys.Bf16),
    ("runtime.zero.config.DeepSpeedZeroConfig", _zero_keys.ZeroOptimization),
    ("runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig", _zero_keys.OffloadParam),
    ("runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig", _zero_keys.OffloadOptimizer),
    ("runtime.zenflow.zenflow_config.ZenFlowConfig", _zero_keys.Zenflow),
    ("monitor.config.TensorBoardConfig", _tool_keys.Tensorboard),
    ("monitor.config.WandbConfig", _tool_keys.Wandb),
    ("monitor.config.CSVConfig", _tool_keys.CsvMonitorSection),
    ("monitor.config.CometConfig", _tool_keys.Comet),
    ("comm.config.CommsLoggerConfig", _tool_keys.CommsLogger),
    ("utils.config.DeepSpeedThroughputTimerConfig", _tool_keys.ThroughputTimer),
    ("compile.config.CompileConfig", _parallel_keys.Compile),
    ("runtime.config.HybridEngineConfig", _parallel_keys.HybridEngine),
    ("runtime.tensor_parallel.config.TPTrainingConfig", _parallel_keys.TensorParallel),
    ("inference.config.WeightQuantConfig", _parallel_keys.WeightQuantization),
]
HANDLED_BEFORE = {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"}
OURS_DIFFERS = {"check_grad_overflow"}  # an error unless asked to skip
NESTED = {"offload_param", "offload_optimizer", "leaf_module", "tensor_parallel", "comms_logger", "dtype", "q_type"}


def peer_model(name):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: nothing to compare with")
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(f"deepspeed.{module}"), cls)


def names_of(model):
    fields = {name: field.alias or name for name, field in model.model_fields.items()}
    return fields, set(fields) | set(fields.values())


@pytest.mark.parametrize(("peer", "section"), PAIRS, ids=lambda part: str(part).rpartition(".")[2])
def test_every_key_of_the_peer_is_known_here(peer, section):
    _, names = names_of(peer_model(peer))
    assert names - HANDLED_BEFORE <= set(section.written_keys())


@pytest.mark.parametrize(("peer", "section"), PAIRS, ids=lambda part: str(part).rpartition(".")[2])
def test_defaults_are_the_peers(peer, section):
    model = peer_model(peer)
    fields, _ = names_of(model)
    for name, field in model.model_fields.items():
        ours = section.aliases.get(name, fields[name])
        ours = section.aliases.get(ours, ours)
        if name in HANDLED_BEFORE | NESTED | OURS_DIFFERS:
            continue
        default = section.model_fields[ours].get_default(call_default_factory=True)
        theirs = field.get_default(call_default_factory=True)
        same = default == theirs or (list(default) == list(theirs) if isinstance(default, tuple) else False)
        assert same or dict(default) == theirs, name


@pytest.mark.parametrize("name", sorted(_optim_keys.SCHEDULES))
def test_schedules_take_the_peers_arguments_with_its_defaults(name):
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="deepspeed is not installed")
    arguments = dict(inspect.signature(getattr(schedules, name)).parameters)
    del arguments["optimizer"]
    fields = _optim_keys.SCHEDULES[name].model_fields
    assert set(fields) == set(arguments)
    for key, argument in arguments.items():
        assert fields[key].is_required() == (argument.default is inspect.Parameter.empty)
        if not fields[key].is_required():
            assert fields[key].default == argument.default
