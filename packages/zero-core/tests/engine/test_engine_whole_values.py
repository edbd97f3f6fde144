"""Whole parameters and states outside a pass, what is seen of released ones, and the way back to a plain model."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_cases import (
    LR,
    RANKS,
    STAGES,
    WIDE,
    WIDTH,
    adamw,
    batch,
    build,
    distance,
    outcome,
    plain,
    start,
    train,
    weights,
)
from torch import nn

import zero_core
from zero_comm import run_ranks


def states(stage: int) -> dict[str, Any]:
    engine = start(stage)
    parameter = engine.module.blocks[0].weight
    train(engine, 0, 2)
    first = engine.full_param(parameter)
    first.fill_(7.0)  # a copy: must not reach the engine
    return {
        "weight": engine.full_param(parameter),
        "exp_avg": engine.full_state(parameter, "exp_avg"),
        "exp_avg_sq": engine.full_state(parameter, "exp_avg_sq"),
        "foreign": outcome(lambda: engine.full_param(nn.Parameter(torch.zeros(3)))),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_whole_parameters_and_states_are_copies_of_what_torch_would_hold(stage: int) -> None:
    reference = build()
    optimizer = adamw(reference)
    plain(reference, optimizer, 0, 2)
    expected = optimizer.state[reference.blocks[0].weight]
    for seen in run_ranks(states, RANKS, stage):
        assert torch.allclose(seen["weight"], reference.blocks[0].weight, rtol=0, atol=1e-12)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(seen[key], expected[key], rtol=1e-12, atol=1e-16), key
        assert "does not belong to this engine's model" in seen["foreign"]


def gathered_blocks(stage: int) -> dict[str, Any]:
    engine = start(stage, build(width=WIDE))
    rank = torch.distributed.get_rank()
    head, enter, block = engine.module.head, engine.module.enter, engine.module.blocks[0]
    seen: dict[str, Any] = {"identity": [id(p) for p in engine.module.parameters()]}
    with engine.gathered(engine.module.parameters()):
        seen["whole"] = weights(engine.module)
    with engine.gathered([head.weight, None, torch.zeros(2), head.bias], modifier_rank=0), torch.no_grad():
        head.weight.fill_(0.25 if rank == 0 else 9.0)
    with engine.gathered(enter.weight, modifier_rank=1), torch.no_grad():
        enter.weight.data = torch.full_like(enter.weight, 0.5 if rank == 1 else 9.0)
    with engine.gathered(block.bias), engine.gathered(block.parameters()):
        seen["nested"] = block.bias.detach().clone()
    seen["identity"] = seen["identity"] == [id(p) for p in engine.module.parameters()]
    seen["changed"] = weights(engine)
    train(engine, 0, 2)
    seen["trained"] = weights(engine)
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_gathered_shows_whole_parameters_and_takes_changes_of_the_modifier_rank(stage: int) -> None:
    reference = build(width=WIDE)
    seen = run_ranks(gathered_blocks, RANKS, stage)
    for own in seen:
        assert distance(own["whole"], weights(reference)) == 0.0 and own["identity"]
        assert torch.equal(own["nested"], reference.blocks[0].bias)
    with torch.no_grad():
        reference.head.weight.fill_(0.25)
        reference.enter.weight.fill_(0.5)
    for own in seen:
        assert distance(own["changed"], weights(reference)) == 0.0
    plain(reference, adamw(reference), 0, 2)
    for own in seen:
        assert distance(own["trained"], weights(reference)) <= 1e-12


def released(stage: int) -> dict[str, Any]:
    engine = start(stage)
    train(engine, 0, 1)
    block = engine.module.blocks[0]
    seen: dict[str, Any] = {
        "shape": tuple(block.weight.shape),
        "numel": sum(p.numel() for p in engine.module.parameters()),
        "nan": bool(torch.isnan(block.weight.detach()).all()),
    }
    if torch.distributed.get_rank() == 0:  # one rank only: nothing may be sent
        seen["bytes"] = block.weight.untyped_storage().nbytes()
        seen["repr"] = repr(engine.module)

    def write() -> None:
        with torch.no_grad():
            block.weight.add_(1.0)

    seen["write"] = outcome(write)
    train(engine, 1, 2)
    return seen


def test_a_released_parameter_keeps_its_shape_reads_as_nan_and_refuses_writes() -> None:
    model = build()
    for seen in run_ranks(released, RANKS, 3):
        assert seen["shape"] == (WIDTH, WIDTH) and seen["numel"] == sum(p.numel() for p in model.parameters())
        assert seen["nan"] and seen["write"].startswith("ReleasedParameterError")
        assert seen.get("bytes", 0) <= 64


def back_to_plain(stage: int) -> dict[str, Any]:
    model = build()
    parameters = list(model.parameters())
    engine = start(stage, model)
    train(engine, 0, 2)
    engine.destroy()
    engine.destroy()  # a second time does nothing
    seen: dict[str, Any] = {
        "same": all(a is b for a, b in zip(parameters, model.parameters(), strict=True)),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        + sum(len(p._post_accumulate_grad_hooks or ()) for p in parameters),
    }
    sent = engine.ledger.calls()
    plain(model, torch.optim.SGD(model.parameters(), lr=LR), 2, 4)
    seen["sent"] = engine.ledger.calls() - sent
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = build(seed=1)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    seen["weights"], seen["loaded"] = weights(model), distance(weights(other), weights(model))
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_destroy_leaves_a_whole_plain_model_that_trains_on(stage: int) -> None:
    reference = build()
    plain(reference, adamw(reference), 0, 2)
    plain(reference, torch.optim.SGD(reference.parameters(), lr=LR), 2, 4)
    for seen in run_ranks(back_to_plain, RANKS, stage):
        assert seen["same"] and seen["hooks"] == 0 and seen["sent"] == 0 and seen["loaded"] == 0.0
        assert distance(seen["weights"], weights(reference)) <= 1e-12


def rebuilt(first_stage: int, second_stage: int) -> dict[str, torch.Tensor]:
    model = build()
    engine = start(first_stage, model)
    train(engine, 0, 2)
    engine.destroy()
    engine = start(second_stage, model)
    train(engine, 2, 4)
    engine.destroy()
    return weights(model)


@pytest.mark.parametrize(("first_stage", "second_stage"), [(3, 3), (3, 1), (0, 3), (2, 0)])
def test_an_engine_can_be_built_again_over_the_same_model(first_stage: int, second_stage: int) -> None:
    reference = build()
    plain(reference, adamw(reference), 0, 2)
    plain(reference, adamw(reference), 2, 4)
    assert distance(run_ranks(rebuilt, RANKS, first_stage, second_stage)[0], weights(reference)) <= 1e-12


def state_dict_of(stage: int) -> dict[str, Any]:
    engine = start(stage)
    outside = engine.module.state_dict()
    with engine.gathered(engine.module.parameters()):
        inside = {name: value.clone() for name, value in engine.module.state_dict().items()}
    saved = io.BytesIO()
    loads = "not saved"
    if torch.distributed.get_rank() == 0:
        torch.save(outside, saved)
        saved.seek(0)
        loads = outcome(lambda: build(seed=1).load_state_dict(torch.load(saved, weights_only=True)))
    return {
        "meta": sorted(name for name, value in outside.items() if value.is_meta),
        "shapes": {name: tuple(value.shape) for name, value in outside.items()},
        "inside": inside,
        "loads": loads,
    }


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_dict_is_whole_inside_a_gather(stage: int) -> None:
    expected = build().state_dict()
    for seen in run_ranks(state_dict_of, RANKS, stage):
        assert distance(seen["inside"], expected) == 0.0
        assert seen["shapes"] == {name: tuple(value.shape) for name, value in expected.items()}
        if stage < 3:
            assert not seen["meta"] and seen["loads"] in ("no error", "not saved")


def test_a_state_dict_of_released_parameters_cannot_be_loaded_by_mistake() -> None:
    first, second = run_ranks(state_dict_of, RANKS, 3)
    assert first["meta"] == second["meta"] == sorted(name for name, _ in build().named_parameters())
    assert first["loads"] != "no error"


def gather_inside_a_pass() -> str:
    engine = start(3)
    messages: list[str] = []

    def peek(module: nn.Module, args: Any) -> None:
        with engine.gathered(engine.module.head.weight):
            messages.append("opened")

    engine.module.blocks[0].register_forward_pre_hook(peek)
    return outcome(lambda: engine(*batch(0)))


def test_gathering_by_hand_inside_a_pass_is_refused_with_what_to_do() -> None:
    for message in run_ranks(gather_inside_a_pass, RANKS):
        assert message.startswith("PartitionError") and "before or after the pass" in message


def replaced(stage: int) -> dict[str, Any]:
    engine = start(stage)
    rank = torch.distributed.get_rank()
    weight, bias = engine.module.blocks[0].weight, engine.module.head.bias
    train(engine, 0, 1)
    engine.set_full_param(weight, torch.full_like(engine.full_param(weight), 0.125 if rank == 0 else 9.0))
    engine.set_full_state(bias, "exp_avg", torch.full((3,), 0.5 if rank == 0 else 9.0, dtype=torch.float64))
    engine.backward(engine(*batch(1)))
    engine.set_full_grad(bias, torch.full((3,), 2.0 if rank == 0 else 9.0, dtype=torch.float64))
    grad, norm = engine.full_grad(bias), engine.clip_grad_norm_(float("inf"))
    engine.step()
    return {"grad": grad, "norm": norm, "weights": weights(engine), "shape": outcome(
        lambda: engine.set_full_param(weight, torch.zeros(3, dtype=torch.float64)))}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_whole_parameters_gradients_and_states_can_be_replaced(stage: int) -> None:
    reference = build()
    optimizer = adamw(reference)
    plain(reference, optimizer, 0, 1)
    with torch.no_grad():
        reference.blocks[0].weight.fill_(0.125)
    optimizer.state[reference.head.bias]["exp_avg"].fill_(0.5)
    reference(*batch(1, whole=True)).backward()
    assert reference.head.bias.grad is not None
    reference.head.bias.grad.fill_(2.0)
    norm = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf")))
    optimizer.step()
    for seen in run_ranks(replaced, RANKS, stage):
        assert seen["grad"].tolist() == [2.0] * 3 and seen["norm"] == pytest.approx(norm, rel=1e-12)
        assert distance(seen["weights"], weights(reference)) <= 1e-12
        assert "Error" in seen["shape"] and "blocks.0.weight" in seen["shape"], seen["shape"]


def nested(stage: int) -> dict[str, Any]:
    """One gather of two models' parameters, and another inside it that changes one of them."""
    first, second = start(stage), start(stage, build(seed=1))
    inner = first.module.head.weight
    everything = [*first.module.parameters(), None, torch.ones(2), *second.module.parameters()]
    before = distance(weights(second), weights(second.module)) if stage < 3 else 0.0
    with zero_core.gathered(iter(everything)):
        whole = distance(
            {n: p.detach() for n, p in second.module.named_parameters()}, dict(build(seed=1).named_parameters())
        )
        with zero_core.gathered(inner, modifier_rank=1), torch.no_grad():
            inner.fill_(2.0 + dist.get_rank())
        still = bool((inner == 3.0).all()) and not bool(first.module.enter.weight.isnan().any())
    absent = bool(inner.isnan().all())
    after = first.full_param(inner).unique().tolist()
    first.destroy(unshard=False)
    second.destroy(unshard=False)
    return {"before": before, "whole": whole, "still": still, "absent": absent, "after": after}


@pytest.mark.parametrize("stage", STAGES)
def test_gathers_nest_and_take_parameters_of_several_models(stage: int) -> None:
    for found in run_ranks(nested, RANKS, stage):
        assert found == {"before": 0.0, "whole": 0.0, "still": True, "absent": stage == 3, "after": [3.0]}
