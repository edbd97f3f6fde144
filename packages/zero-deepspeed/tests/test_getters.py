"""The small methods of DeepSpeed's engine."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from named_cases import build, settings, start

from zero_deepspeed.engine import DeepSpeedEngine
from zero_deepspeed.errors import UnsupportedError
from zero_deepspeed.getters import GETTERS, REFUSED

pytestmark = pytest.mark.usefixtures("alone")

SECTIONS = {"zero_offload_optimizer", "zero_offload_param", "aio_config", "tensor_parallel_config", "zenflow_config"}
"""What is an object of each project's own."""
OURS_ONLY = {
    "cpuadam_cores_perc": "DeepSpeed's method gives 0.9 unless the optimizer is offloaded",
    "zero_partial_offload": "the same, 1.0",
    "torch_autocast_lower_precision_safe_modules": "None is the default classes, which DeepSpeed lists",
    "compile_zero_optimization_stage": "DeepSpeed's raises TypeError without deepcompile passes",
}


def test_each_tells_its_key_and_refused_ones_what_to_use() -> None:
    engine = start(3, zero_optimization={"stage": 3, "reduce_bucket_size": 4321, "stage3_prefetch_bucket_size": 77})
    assert engine.zero_reduce_bucket_size() == 4321 and engine.zero_prefetch_bucket_size() == 77
    assert engine.optimizer_params() == engine.config["optimizer"]["params"] and engine.scheduler_params() is None
    assert engine.zero_overlap_comm() is True and engine.zero_cpu_offload() is False
    assert engine.get_data_parallel_rank() == engine.get_model_parallel_rank() == 0
    assert engine.is_map_style_dataset([1]) and not engine.is_iterable_style_dataset([1])
    for name in GETTERS:
        getattr(engine, name)()
    for name in REFUSED:
        with pytest.raises(UnsupportedError, match=name):
            getattr(engine, name)()
    with pytest.raises(AttributeError, match="zero_reduce_bucket"):
        engine.zero_reduce_bucket()


@pytest.mark.parametrize(
    ("optimizer", "momentum"),
    [
        ({"type": "adamw", "params": {"lr": 0.01, "betas": [0.8, 0.9]}}, (0.8, 0.9)),
        ({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.7}}, 0.7),
        ({"type": "adagrad", "params": {"lr": 0.01}}, 0.0),
    ],
)
def test_the_engine_answers_for_its_groups(optimizer: dict[str, Any], momentum: Any) -> None:
    engine = start(2, optimizer=optimizer, gradient_clipping=0.5)
    assert engine.get_mom() == [momentum] and engine.get_type() == [0.0] and engine.get_lr() == [0.01]
    assert engine.optimizer_name() == optimizer["type"] and engine.scheduler_name() is None
    assert engine.gradient_clipping() == 0.5 and engine.get_data_types() == (torch.float32, torch.float32)
    shards = (engine.zero_optimization_partition_gradients(), engine.zero_optimization_partition_weights())
    assert engine.zero_optimization() and shards == (True, False)
    assert not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.wall_clock_breakdown())


def test_what_is_assigned_reaches_the_engine_that_trains() -> None:
    engine = start(1)
    engine.global_steps, engine.lr_scheduler = 7, None
    engine.set_train_micro_batch_size(engine.train_micro_batch_size_per_gpu() + 1)
    sizes = engine.zero_engine.training_state.sizes
    assert engine.zero_engine.global_steps == engine.global_steps == 7 and engine.zero_engine.lr_scheduler is None
    assert engine.get_batch_info() == (sizes.train, sizes.micro, sizes.steps)
    assert set(engine.state_dict()) == {f"module.{name}" for name in engine.module.state_dict()}
    engine.empty_partition_cache()


@pytest.mark.peer
def test_values_are_those_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed = pytest.importorskip("deepspeed")
    monkeypatch.setenv("LOCAL_RANK", "0")
    offload = {"stage": 2, "sub_group_size": 999, "offload_optimizer": {"device": "cpu"}}
    for changes in ({}, {"zero_optimization": {"stage": 3}}, {"zero_optimization": offload}):
        config = settings(2, gradient_clipping=1.0, flops_profiler={"enabled": False, "module_depth": 3}, **changes)
        ours = start(2, gradient_clipping=1.0, flops_profiler={"enabled": False, "module_depth": 3}, **changes)
        model = build()
        theirs, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        compared = sorted(set(GETTERS) - SECTIONS - set(OURS_ONLY))
        values = {name: (getattr(ours, name)(), getattr(theirs, name)()) for name in compared}
        assert {name: pair for name, pair in values.items() if pair[0] != pair[1]} == {}
        ours.destroy()


@pytest.mark.peer
def test_every_method_of_deepspeeds_engine_is_answered_or_refused_by_name() -> None:
    engine = pytest.importorskip("deepspeed.runtime.engine")
    tree = ast.parse(Path(inspect.getsourcefile(engine) or "").read_text(encoding="utf-8"))
    (theirs,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DeepSpeedEngine"]
    public = {n.name for n in theirs.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}
    answered = {*GETTERS, *REFUSED}
    missing = {name for name in public - answered if not hasattr(DeepSpeedEngine, name)}
    assert missing == set()
