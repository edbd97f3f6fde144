"""Models and engines that are not the usual case: frozen, empty, inference only, copied, several at once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from engine_cases import (
    LR,
    RANKS,
    STAGES,
    adamw,
    batch,
    build,
    config,
    distance,
    outcome,
    plain,
    start,
    train,
    weights,
    without,
)
from torch import nn

import zero_core
from zero_comm import run_ranks


def freeze(model: nn.Module, what: str) -> nn.Module:
    frozen = {
        "one parameter": [model.head.bias],
        "a whole unit": list(model.blocks[0].parameters()),
        "all but a bias": [p for n, p in model.named_parameters() if n != "head.bias"],
    }[what]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return model


def frozen(what: str, stage: int) -> dict[str, Any]:
    engine = start(stage, freeze(build(), what))
    train(engine, 0, 3)
    held = sum(o.fragment.length for o in engine.sharded_optimizer.fragments)  # type: ignore[union-attr]
    return {"weights": weights(engine), "norm": engine.get_global_grad_norm(), "held": held}


@pytest.mark.parametrize("stage", (0, 2, 3))
@pytest.mark.parametrize("what", ("one parameter", "a whole unit", "all but a bias"))
def test_frozen_parameters_stay_and_have_no_state(what: str, stage: int) -> None:
    reference = freeze(build(), what)
    norms = plain(reference, adamw(reference), 0, 3)
    trained = sum(p.numel() for p in reference.parameters() if p.requires_grad)
    answers = run_ranks(frozen, RANKS, what, stage)
    for seen in answers:
        assert distance(seen["weights"], weights(reference)) <= 1e-12
        assert seen["norm"] == pytest.approx(norms[-1], rel=1e-12)
    assert sum(seen["held"] for seen in answers) == trained * (RANKS if stage == 0 else 1)


def loop_over_frozen(what: str, stage: int, listed: bool) -> tuple[dict[str, torch.Tensor], str]:
    """Train as a script does that looks at every ``.grad`` and zeroes by the optimizer, which lists all parameters
    or the trained ones; then write ``.grad`` of a frozen one."""
    model = freeze(build(), what)
    chosen = [p for p in model.parameters() if listed or p.requires_grad]
    engine, optimizer, _, _ = zero_core.initialize(
        model=model,
        optimizer=torch.optim.AdamW(chosen, lr=LR, weight_decay=0.01),
        config=without(config(stage), "optimizer"),
    )
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for number in range(3):
        optimizer.zero_grad(set_to_none=number != 1)
        engine.backward(engine(*batch(number)))
        assert all(p.grad is None for p in frozen)
        assert float(torch.nn.utils.clip_grad_norm_(frozen, 1.0)) == 0.0
        frozen[0].grad = None
        if what == "a whole unit":
            model.blocks[0].zero_grad()
        engine.step()
    found = weights(engine)
    engine.backward(engine(*batch(0)))
    frozen[0].grad = torch.ones_like(frozen[0])
    return found, outcome(engine.step)


@pytest.mark.parametrize("ranks", (1, RANKS))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("what", "listed"), [("a whole unit", True), ("all but a bias", True), ("a whole unit", False)]
)
def test_gradients_of_frozen_parameters_are_as_in_torch(what: str, listed: bool, stage: int, ranks: int) -> None:
    reference = freeze(build(), what)
    plain(reference, adamw(reference), 0, 3)
    for found, said in run_ranks(loop_over_frozen, ranks, what, stage, listed):
        assert distance(found, weights(reference)) <= 1e-12
        assert (said.startswith("PartitionError: parameter '") and "was frozen" in said) == listed, said


class NoParameters(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def no_parameters(stage: int) -> tuple[Any, str, str]:
    settings = config(stage)
    engine, optimizer, _, _ = zero_core.initialize(model=NoParameters(), config=without(settings, "optimizer"))
    doubled = engine(torch.ones(2)).tolist()
    engine.destroy()
    refusal = outcome(lambda: zero_core.initialize(model=NoParameters(), config=settings))
    return doubled, refusal, str(optimizer)


@pytest.mark.parametrize("stage", (0, 3))
def test_a_model_without_parameters_runs_and_has_nothing_to_train(stage: int) -> None:
    for doubled, refusal, optimizer in run_ranks(no_parameters, RANKS, stage):
        assert doubled == [2.0, 2.0] and optimizer == "None"
        assert refusal.startswith("UsageError") and "nothing to train" in refusal


def inference(stage: int) -> dict[str, Any]:
    engine, optimizer, _, scheduler = zero_core.initialize(model=build(), config=without(config(stage), "optimizer"))
    engine.eval()
    outputs = []
    for grad in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with grad():
            outputs.append(engine(*batch(0)).item())
    loss = engine(*batch(0))
    return {
        "outputs": outputs,
        "nothing": (optimizer, scheduler, engine.optimizer, engine.get_global_grad_norm()),
        "backward": outcome(lambda: engine.backward(loss)),
        "step": outcome(engine.step),
        "lr": outcome(engine.get_lr),
        "state": engine.memory_report()["optimizer states"],
        "training": engine.module.training,
        "weights": weights(engine),
    }


@pytest.mark.parametrize("stage", (0, 3))
def test_an_engine_without_an_optimizer_only_infers(stage: int) -> None:
    reference = build()
    answers = run_ranks(inference, RANKS, stage)
    expected = reference(*batch(0, whole=True)).item()
    for index in range(3):
        assert sum(seen["outputs"][index] for seen in answers) / RANKS == pytest.approx(expected, rel=1e-12)
    for seen in answers:
        assert seen["nothing"] == (None,) * 4 and seen["state"] == 0 and not seen["training"]
        for call in ("backward", "step", "lr"):
            assert seen[call].startswith("UsageError") and "no optimizer" in seen[call]
        assert distance(seen["weights"], weights(reference)) == 0.0


def with_evaluation(stage: int) -> dict[str, Any]:
    engine = start(stage, gradient_accumulation_steps=2)
    evaluated = []
    for number in range(4):
        engine.backward(engine(*batch(number)))
        engine.eval()
        with torch.no_grad():
            evaluated.append(engine(*batch(number + 50)).item())
        engine.train()
        engine.step()
        with torch.inference_mode():
            evaluated.append(engine(*batch(number + 60)).item())
    return {"weights": weights(engine), "evaluated": evaluated, "training": engine.training and engine.module.training}


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_between_training_steps_changes_nothing(stage: int) -> None:
    reference = build()
    plain(reference, adamw(reference), 0, 2, accumulation=2)
    answers = run_ranks(with_evaluation, RANKS, stage)
    last = sum(seen["evaluated"][-1] for seen in answers) / RANKS
    assert last == pytest.approx(reference(*batch(63, whole=True)).item(), rel=1e-12)
    for seen in answers:
        assert distance(seen["weights"], weights(reference)) <= 1e-12 and seen["training"]


def two_engines(stage: int) -> list[dict[str, torch.Tensor]]:
    first, second = start(stage), start(3 - stage, build(seed=1))
    for number in range(3):
        train(first, number, number + 1)
        train(second, number + 10, number + 11)
    second.destroy()
    train(first, 3, 4)
    return [weights(first), weights(second.module)]


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_two_engines_in_one_process_train_apart(stage: int) -> None:
    one, two = build(), build(seed=1)
    plain(one, adamw(one), 0, 4)
    plain(two, adamw(two), 10, 13)
    for seen in run_ranks(two_engines, RANKS, stage):
        assert distance(seen[0], weights(one)) <= 1e-12 and distance(seen[1], weights(two)) <= 1e-12


def copied(stage: int) -> dict[str, Any]:
    model = build()
    teacher = copy.deepcopy(model)
    engine = start(stage, model)
    with torch.no_grad():
        kept = teacher(*batch(0, whole=True)).item()
    train(engine, 0, 2)
    with torch.no_grad():
        still = teacher(*batch(0, whole=True)).item() == kept
    return {"teacher": weights(teacher), "still": still, "weights": weights(engine)}


@pytest.mark.parametrize("stage", (0, 3))
def test_a_copy_made_before_initialize_is_independent(stage: int) -> None:
    reference, initial = build(), build()
    plain(reference, adamw(reference), 0, 2)
    for seen in run_ranks(copied, RANKS, stage):
        assert seen["still"] and distance(seen["teacher"], weights(initial)) == 0.0
        assert distance(seen["weights"], weights(reference)) <= 1e-12


def test_attributes_and_methods_of_the_module_are_reached_through_the_engine(alone: None) -> None:
    engine = start(1)
    assert engine.motto == "several units" and engine.head is engine.module.head
    assert torch.equal(engine.predict(batch(0)[0]), engine.module.predict(batch(0)[0]))
    with pytest.raises(AttributeError, match="no_such_thing"):
        engine.no_such_thing  # noqa: B018
    assert not hasattr(engine, "no_such_thing")


def direct_calls(stage: int) -> list[float]:
    engine = start(stage)
    x, y = batch(0)
    with torch.no_grad():
        return [engine.predict(x).sum().item(), engine.module.predict(x).sum().item(), engine.module(x, y).item()]


@pytest.mark.parametrize("stage", (0, 3))
def test_the_module_may_be_called_directly(stage: int) -> None:
    reference = build()
    answers = run_ranks(direct_calls, RANKS, stage)
    x, y = batch(0, whole=True)
    expected = reference.predict(x).sum().item()
    assert sum(seen[0] for seen in answers) == sum(seen[1] for seen in answers) == pytest.approx(expected, rel=1e-10)
    assert sum(seen[2] for seen in answers) / RANKS == pytest.approx(reference(x, y).item(), rel=1e-12)


def copied_while_gathered(stage: int) -> dict[str, Any]:
    settings = {**without(config(stage), "data_types"), "bf16": {"enabled": True}}
    engine = zero_core.initialize(model=build(torch.float32), config=settings)[0]
    for number in range(2):
        engine.backward(engine(*batch(number, torch.bfloat16)))
        engine.step()
    before = weights(engine)
    with engine.gathered(engine.module.parameters()):
        average = copy.deepcopy(engine.module)
    sent = engine.ledger.calls()
    seen: dict[str, Any] = {"alone": "", "pickled": ""}
    if torch.distributed.get_rank() == 0:  # a copy belongs to its rank
        seen["alone"] = outcome(lambda: average(*batch(0, torch.bfloat16)).backward())
        seen["pickled"] = outcome(lambda: pickle.loads(pickle.dumps(average)))
    average.load_state_dict({name: torch.zeros_like(value) for name, value in average.state_dict().items()})
    seen["zero"] = all(not p.any() for p in average.parameters())
    seen["sent"] = engine.ledger.calls() - sent
    return {**seen, "engine": distance(before, weights(engine))}


@pytest.mark.parametrize("stage", (1, 3))
def test_a_copy_made_inside_a_gather_is_a_plain_model(stage: int) -> None:
    first, second = run_ranks(copied_while_gathered, RANKS, stage, timeout=20)
    assert first["alone"] == first["pickled"] == "no error"
    for seen in (first, second):
        assert seen["zero"] and seen["sent"] == 0 and seen["engine"] == 0.0


def warm(stage: int) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = adamw(model)
    plain(model, optimizer, 0, 2)
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=config(stage))[0]
    train(engine, 2, 4)
    return weights(engine)


@pytest.mark.parametrize("stage", (0, 3))
def test_an_optimizer_with_a_past_goes_on(stage: int) -> None:
    reference = build()
    plain(reference, adamw(reference), 0, 4)
    assert distance(run_ranks(warm, RANKS, stage)[0], weights(reference)) <= 1e-12
