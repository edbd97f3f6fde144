"""Bad input: a clear error on every rank, and never a hang."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import Run

from zero_comm import run_ranks

RANKS, STAGES = 2, (0, 1, 2, 3)


def outcome(scenario: Callable[[], Any]) -> str:
    """The error that a scenario raises on this rank."""
    try:
        scenario()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def build(config_changes: dict[str, Any], stage: int = 3) -> str:
    import zero_core

    settings = {**training.config(Run(), stage, dist.get_world_size()), **config_changes}
    return outcome(lambda: zero_core.initialize(model=zoo.build("plain"), config=settings))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_micro_batch_sise_per_gpu": 1}, ["train_micro_batch_sise_per_gpu", "train_micro_batch_size_per_gpu"]),
        ({"zero_optimization": {"stage": 3, "prefetch_bucketsize": 1}}, ["zero_optimization.prefetch_bucketsize"]),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, ["zero_optimization.offload_param.devise"]),
        ({"zero_optimization": {"stage": 7}}, ["zero_optimization.stage", "7"]),
        ({"train_batch_size": 7}, ["train_batch_size", "7"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}, "data_types": {}}, ["fp16", "bf16"]),
    ],
)
def test_a_wrong_configuration_is_named_on_every_rank(changes: dict[str, Any], words: list[str]) -> None:
    for message in run_ranks(build, RANKS, changes):
        assert message.startswith("ConfigError") and all(word in message for word in words), message


def with_optimizer(kind: str, stage: int) -> str:
    import zero_core

    model, other = zoo.build("plain"), zoo.build("plain", seed=1)
    parameters: list[Any] = list(model.parameters())
    if kind == "foreign":
        optimizer: Any = torch.optim.AdamW([*parameters, *other.norm.parameters()], lr=1e-3)
    elif kind == "duplicate":
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [parameters[0]]})
    else:
        optimizer = getattr(torch.optim, kind)(parameters)
    config = training.config(Run(), stage, dist.get_world_size())
    return outcome(lambda: zero_core.initialize(model=model, optimizer=optimizer, config=config))


@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("foreign", ["does not belong to the model"]),
        ("duplicate", ["twice"]),
        ("LBFGS", ["LBFGS", "closure"]),
    ],
)
def test_an_optimizer_that_cannot_be_right_is_refused_on_every_rank(kind: str, words: list[str], stage: int) -> None:
    for message in run_ranks(with_optimizer, RANKS, kind, stage):
        assert message.startswith("PartitionError") and all(word in message for word in words), message


def adafactor(stage: int) -> dict[str, torch.Tensor]:
    import zero_core

    model = zoo.build("plain")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    config = training.config(Run(), stage, dist.get_world_size())
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]
    training.train(engine, Run(), 0, 5)
    return training.weights(engine)


@pytest.mark.parametrize("stage", (0, 3))
def test_an_optimizer_of_whole_matrices_is_right(stage: int) -> None:
    model = zoo.build("plain")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    for step in range(5):
        sum(model(*zoo.batch(step, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert training.deviation(run_ranks(adafactor, RANKS, stage)[0], expected) <= 1e-12


def not_a_number(policy: str, stage: int) -> tuple[str, float, bool]:
    """A NaN loss on rank 1 only; returns the error, a weight afterwards and whether later steps still work."""
    import zero_core

    run = Run(dtype="fp32")
    config = {**training.config(run, stage, dist.get_world_size()), "data_types": {}}
    if policy != "fp32":
        config[policy] = {"enabled": True, **({"initial_scale_power": 4, "hysteresis": 1} if policy == "fp16" else {})}
    engine = zero_core.initialize(model=zoo.build("plain", torch.float32), config=config)[0]
    losses = engine(*zoo.batch(0, 0, dist.get_rank(), dist.get_world_size()))
    engine.backward(losses[0] * (math.nan if dist.get_rank() == 1 else 1.0))
    message = outcome(engine.step)
    skipped = engine.skipped_steps == 1
    weight = float(engine.full_param(engine.module.norm.weight).sum())
    engine.backward(engine(*zoo.batch(1, 0, dist.get_rank(), dist.get_world_size()))[0])
    engine.step()
    return message, weight, skipped and engine.was_step_applied()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("policy", ("fp32", "bf16"))
def test_a_nan_loss_without_a_loss_scale_is_an_error_that_names_a_parameter(policy: str, stage: int) -> None:
    for message, weight, _ in run_ranks(not_a_number, RANKS, policy, stage):
        assert message.startswith("NonFiniteGradientError") and "'embedding.weight'" in message, message
        assert weight == zoo.WIDTH


@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_loss_under_a_dynamic_loss_scale_skips_the_step_on_every_rank(stage: int) -> None:
    for message, weight, recovered in run_ranks(not_a_number, RANKS, "fp16", stage):
        assert message == "no error" and weight == zoo.WIDTH and recovered


def different_models(what: str) -> str:
    import zero_core

    torch.manual_seed(dist.get_rank() if what == "seed" else 0)
    model = zoo.Transformer(unused=what == "structure" and dist.get_rank() == 1).double()
    config = training.config(Run(steps=2), 3, dist.get_world_size())

    def scenario() -> None:
        engine = zero_core.initialize(model=model, config=config)[0]
        training.train(engine, Run(), 0, 2)
        model.result = training.weights(engine)

    message = outcome(scenario)
    return message if message != "no error" else repr(sorted(training.bits(model.result).items()))


def test_ranks_with_different_models_are_refused_by_the_parameter_that_differs() -> None:
    for message in run_ranks(different_models, RANKS, "structure"):
        assert message.startswith("PartitionError") and "unused.weight" in message, message


def test_ranks_with_different_seeds_are_made_equal() -> None:
    first, second = run_ranks(different_models, RANKS, "seed")
    assert first == second and "Error" not in first[:40]


class Failing(zoo.Transformer):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        if self.fails_at == 2 and dist.get_rank() == 1:
            raise ArithmeticError("no luck in block 7")
        self.fails_at += 1
        return super().forward(x, y)


def failing_rank(stage: int) -> str:
    model = Failing().double()
    model.fails_at = 0
    engine = training.start(Run(), stage, model)
    return outcome(lambda: training.train(engine, Run(), 0, 5))


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_raises_in_forward_is_named_with_its_cause_on_every_rank(stage: int) -> None:
    ours, theirs = run_ranks(failing_rank, RANKS, stage, timeout=60)[::-1]
    assert ours.startswith("ArithmeticError: no luck")
    assert theirs.startswith("PeerError") and "rank 1 failed: ArithmeticError: no luck in block 7" in theirs, theirs


def failing_construction(stage: int) -> str:
    import zero_core

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if dist.get_rank() == 1:
            raise ArithmeticError("no luck with the optimizer")
        return torch.optim.AdamW(parameters)

    def scenario() -> None:
        settings = training.config(Run(), stage, RANKS)
        settings.pop("optimizer", None)
        engine = zero_core.initialize(model=zoo.build("plain"), optimizer=optimizer, config=settings)[0]
        training.train(engine, Run(), 0, 1)

    return outcome(scenario)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_fails_while_the_engine_is_made_is_named_on_every_rank(stage: int) -> None:
    ours, theirs = run_ranks(failing_construction, RANKS, stage, timeout=60)[::-1]
    assert ours.startswith("ArithmeticError: no luck")
    assert theirs.startswith("PeerError") and "rank 1 failed: ArithmeticError: no luck with the" in theirs, theirs


def different_calls(stage: int) -> str:
    engine = training.start(Run(), stage)
    training.train(engine, Run(), 0, 1)

    def scenario() -> None:
        losses = engine(*zoo.batch(1, 0, dist.get_rank(), RANKS))
        if dist.get_rank() == 1:
            losses = engine(*zoo.batch(1, 0, dist.get_rank(), RANKS))
        engine.backward(losses[0])
        engine.step()

    return outcome(scenario)


def test_a_different_number_of_forward_calls_is_refused_by_name() -> None:
    for message in run_ranks(different_calls, RANKS, 3, timeout=60):
        assert message.startswith("DesyncError"), message
        assert "rank 0: backward" in message and "rank 1: forward" in message, message


def write_released() -> tuple[str, str, str]:
    engine = training.start(Run(), 3)
    parameter = engine.module.blocks[0].up.weight
    direct = outcome(lambda: parameter.data.add_(1))
    shape_told = tuple(parameter.shape) == (24, 8) and bool(parameter.isnan().all())
    filled = outcome(lambda: parameter.data.fill_(1.0))
    training.train(engine, Run(), 0, 1)
    return direct, filled, str(shape_told)


def test_a_write_to_a_released_parameter_raises_by_name() -> None:
    for direct, filled, shape_told in run_ranks(write_released, RANKS, timeout=60):
        assert shape_told == "True"
        for message in (direct, filled):
            assert message.startswith("ReleasedParameterError") and "'blocks.0.up.weight'" in message, message


def saved_state_dict() -> tuple[set[str], str, bool]:
    engine = training.start(Run(), 3)
    state = engine.module.state_dict()
    fresh = zoo.build("plain")
    with engine.gathered(engine.module.parameters()):
        whole = engine.module.state_dict()
    return (
        {value.device.type for name, value in state.items() if name != "shift"},
        outcome(lambda: fresh.load_state_dict(state)),
        all(value.device.type == "cpu" and bool(value.isfinite().all()) for value in whole.values()),
    )


def test_the_state_dict_of_released_parameters_cannot_be_loaded_by_mistake() -> None:
    for devices, message, whole_inside in run_ranks(saved_state_dict, RANKS):
        assert devices == {"meta"} and whole_inside
        assert message.startswith("RuntimeError") and "blocks.0.up.weight" in message, message


def misuse(what: str, stage: int) -> str:
    """Calls that would do nothing, or something else than they say, if they were let pass."""
    import zero_core

    engine = training.start(Run("frozen and unused"), stage)
    engine.backward(engine(*zoo.batch(0, 0, dist.get_rank(), dist.get_world_size()))[0])
    if what == "optimizer.step":
        return outcome(engine.optimizer.step)
    if what == "initialize again":
        config = training.config(Run(), stage, dist.get_world_size())
        return outcome(lambda: zero_core.initialize(model=engine.module, config=config))
    if what == "step with a closure":
        return outcome(lambda: engine.step(lambda: None))  # type: ignore[arg-type]
    if what == "lazy module":
        lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
        return outcome(lambda: zero_core.initialize(model=lazy, config=training.config(Run(), stage, RANKS)))
    if what == "unfreeze":
        engine.module.blocks[1].requires_grad_(True)
        return outcome(lambda: training.train(engine, Run(), 0, 1))
    engine.destroy()
    return outcome(engine.step)


@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("optimizer.step", ["PartitionError", "engine.step()"]),
        ("initialize again", ["PartitionError", "'embedding.weight'", "destroy()"]),
        ("step with a closure", ["UsageError", "engine.step", "closure"]),
        ("lazy module", ["UsageError", "'0.weight'", "first batch"]),
        ("unfreeze", ["PartitionError", "'blocks.1.norm.weight'", "frozen"]),
        ("step after destroy", ["UsageError", "destroyed"]),
    ],
)
def test_a_call_that_could_not_do_what_it_says_is_refused(what: str, words: list[str], stage: int) -> None:
    for message in run_ranks(misuse, RANKS, what, stage, timeout=60):
        assert all(word in message for word in words), message


def loaded_later(stage: int) -> bool:
    engine = training.start(Run(dtype="bf16"), stage)
    state = {
        name: torch.full_like(value, 0.5, dtype=torch.float32) for name, value in engine.module.state_dict().items()
    }
    engine.module.load_state_dict(state)
    return bool((engine.full_param(engine.module.blocks[0].up.weight) == 0.5).all())


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_masters_follow_a_state_dict_that_is_loaded_later(stage: int) -> None:
    assert run_ranks(loaded_later, RANKS, stage) == [True, True]
