"""Optimizers and schedules: every way to give them, and param groups that stay live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import (
    LR,
    RANKS,
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
from zero_optim import Lion
from zero_optim_kernels.torch import CPUAdagrad, CPUAdam, CPUAdamW, CPULion


def given_as(how: str, model: nn.Module) -> dict[str, Any]:
    """Arguments of `initialize` that all mean AdamW with `LR` and a decay of 0.01."""
    settings = config(1)
    if how == "object":
        return {"optimizer": adamw(model), "config": without(settings, "optimizer")}
    if how == "object over the config's":
        return {"optimizer": adamw(model), "config": {**settings, "optimizer": {"type": "SGD", "params": {"lr": 9.0}}}}
    if how == "function":
        make = lambda parameters: torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01)  # noqa: E731
        return {"optimizer": make, "config": without(settings, "optimizer")}
    if how == "type Adam":
        return {"config": {**settings, "optimizer": {**settings["optimizer"], "type": "Adam"}}}
    if how == "parameters":
        return {"model_parameters": model.parameters(), "config": settings}
    if how == "named parameters":
        return {"model_parameters": model.named_parameters(), "config": settings}
    if how == "groups":
        return {"model_parameters": [{"params": [p]} for p in model.parameters()], "config": settings}
    return {"config": settings}


@pytest.mark.parametrize(
    "how",
    ("name", "object", "object over the config's", "function", "type Adam", "parameters", "named parameters", "groups"),
)
def test_every_way_to_give_the_same_optimizer_trains_the_same(how: str, alone: None) -> None:
    reference, model = build(), build()
    plain(reference, adamw(reference), 0, 3)
    engine, optimizer, _, _ = zero_core.initialize(model=model, **given_as(how, model))
    assert isinstance(optimizer, (torch.optim.AdamW, CPUAdamW)) and engine.optimizer is optimizer
    train(engine, 0, 3)
    assert distance(weights(engine), weights(reference)) <= 1e-12


@pytest.mark.parametrize(
    ("name", "params", "make", "kind"),
    [
        ("Adam", {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, CPUAdam),
        ("AdamW", {"lr": 1e-3}, lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.0), CPUAdamW),
        ("AdamW", {"lr": 1e-3, "amsgrad": True}, torch.optim.AdamW, torch.optim.AdamW),
        ("Adam", {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.1}, torch.optim.AdamW, torch.optim.AdamW),
        ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}, torch.optim.SGD, torch.optim.SGD),
        ("Adagrad", {"lr": 0.01, "eps": 1e-10}, torch.optim.Adagrad, CPUAdagrad),
        ("Lion", {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.99]}, Lion, CPULion),
        ("RMSprop", {"lr": 1e-4, "alpha": 0.9}, torch.optim.RMSprop, torch.optim.RMSprop),
        ("NAdam", {"lr": 1e-3}, torch.optim.NAdam, torch.optim.NAdam),
    ],
)
def test_optimizers_by_name(name: str, params: dict[str, Any], make: Any, kind: type, alone: None) -> None:
    reference, engine = build(), start(1, optimizer={"type": name, "params": params})
    known = {key: value for key, value in params.items() if key not in ("adam_w_mode", "torch_adam")}
    if make is torch.optim.AdamW:
        known.setdefault("weight_decay", 0.0)
    plain(reference, make(reference.parameters(), **known), 0, 3)
    train(engine, 0, 3)
    assert type(engine.optimizer) is kind and distance(weights(engine), weights(reference)) <= 1e-12


class PaperLamb(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 1904.00962, line by line."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for x in group["params"]:
                state = self.state[x]
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = 0.9 * state.get("m", torch.zeros_like(x)) + 0.1 * x.grad
                v = state["v"] = 0.999 * state.get("v", torch.zeros_like(x)) + 0.001 * x.grad**2
                r = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
                u = r + group["weight_decay"] * x
                ratio = float(x.norm() / u.norm()) if x.norm() > 0 and u.norm() > 0 else 1.0
                x -= group["lr"] * min(max(ratio, 0.01), 10.0) * u


def two_muons(model: nn.Module) -> Any:
    """torch's Muon for matrices that are no embedding, AdamW for the rest, stepped together."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrix = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings]
    rest = [p for p in model.parameters() if not any(p is q for q in matrix)]
    pair = (torch.optim.Muon(matrix, lr=0.01, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.002, weight_decay=0.1))

    class Both:
        def step(self) -> None:
            for optimizer in pair:
                optimizer.step()

        def zero_grad(self) -> None:
            for optimizer in pair:
                optimizer.zero_grad()

    return Both()


def whole(name: str, stage: int) -> dict[str, float]:
    params = {
        "lamb": {"lr": 0.01, "weight_decay": 0.1},
        "muon": {"lr": 0.01, "adam_lr": 0.002, "weight_decay": 0.1},
    }[name]
    reference = build()
    expected = PaperLamb(reference.parameters(), **params) if name == "lamb" else two_muons(reference)
    ranks = torch.distributed.get_world_size()
    for number in range(4):
        x, y = batch(number, whole=True)
        together = len(x) // ranks * ranks  # as many samples as the ranks have
        reference(x[:together], y[:together]).backward()
        expected.step()
        expected.zero_grad()
    engine = start(stage, optimizer={"type": name.upper(), "params": params})
    train(engine, 0, 4)
    owned = engine.partition.optimizer.fragments
    split = sum(one.fragment.length < one.unit.parameters[one.number].numel() for one in owned)
    result = {"distance": distance(weights(engine), weights(reference)), "split": split}
    engine.destroy()
    return result


@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("name", ("lamb",) if torch.__version__ < (2, 9) else ("lamb", "muon"))
def test_optimizers_that_look_at_whole_parameters_by_name(name: str, stage: int, ranks: int) -> None:
    found = run_ranks(whole, ranks, name, stage)
    assert all(result["distance"] <= 1e-12 for result in found)
    assert name != "lamb" or not stage or any(result["split"] for result in found)  # shards end inside parameters


def refused_muon() -> None:
    with pytest.raises(zero_core.UsageError, match="optimizer.type: Muon needs torch 2.9 or later, this is torch 2.8"):
        start(1, optimizer={"type": "Muon", "params": {"lr": 0.01}})


@pytest.mark.skipif(torch.__version__ >= (2, 9), reason="from torch 2.9 on there is a torch.optim.Muon")
def test_before_torch_2_9_muon_is_refused_by_the_name_of_its_key() -> None:
    run_ranks(refused_muon, RANKS)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 5e-3},
    ]


def live_groups(stage: int) -> dict[str, Any]:
    model = build()
    engine, optimizer, _, _ = zero_core.initialize(
        model=model, config=config(stage), model_parameters=two_groups(model)
    )
    assert optimizer is not None
    rates = [engine.get_lr()]
    train(engine, 0, 2)
    before = weights(engine)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(engine, 2, 3)
    still = distance(before, weights(engine))
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 2e-3, 1e-4
    optimizer.param_groups[1]["weight_decay"] = 0.5
    rates.append(engine.get_lr())
    train(engine, 3, 5)
    return {"rates": rates, "still": still, "weights": weights(engine)}


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_param_groups_stay_live(stage: int) -> None:
    reference = build()
    optimizer = torch.optim.AdamW(two_groups(reference), lr=LR, weight_decay=0.01)
    plain(reference, optimizer, 0, 2)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    plain(reference, optimizer, 2, 3)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 2e-3, 1e-4
    optimizer.param_groups[1]["weight_decay"] = 0.5
    plain(reference, optimizer, 3, 5)
    for seen in run_ranks(live_groups, RANKS, stage):
        assert seen["rates"] == [[LR, 5e-3], [2e-3, 1e-4]] and seen["still"] == 0.0
        assert distance(seen["weights"], weights(reference)) <= 1e-12


def subset(stage: int) -> dict[str, torch.Tensor]:
    model = build()
    engine, *_ = zero_core.initialize(model=model, config=config(stage), model_parameters=model.blocks.parameters())
    train(engine, 0, 2)
    return weights(engine)


@pytest.mark.parametrize("stage", (0, 3))
def test_model_parameters_say_what_is_trained(stage: int) -> None:
    reference = build()
    plain(reference, torch.optim.AdamW(reference.blocks.parameters(), lr=LR, weight_decay=0.01), 0, 2)
    assert distance(run_ranks(subset, RANKS, stage)[0], weights(reference)) <= 1e-12


WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}
STEP = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}


def scheduled(how: str, stage: int) -> dict[str, Any]:
    model = build()
    settings, arguments = config(stage), {}
    if how == "object":
        arguments["optimizer"] = adamw(model)
        arguments["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(arguments["optimizer"], 2, 0.5)
    elif how == "function":
        arguments["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    else:
        settings["scheduler"] = WARMUP if how == "WarmupLR" else STEP
    engine, _, _, scheduler = zero_core.initialize(model=model, config=settings, **arguments)
    assert scheduler is not None and engine.lr_scheduler is scheduler
    rates = []
    for number in range(5):
        rates.append(engine.get_lr()[0])
        train(engine, number, number + 1)
    return {"rates": rates, "last": scheduler.get_last_lr() == engine.get_lr(), "weights": weights(engine)}


@pytest.mark.parametrize("how", ("object", "function", "torch's by name", "WarmupLR"))
def test_schedules_drive_the_learning_rate_once_per_step(how: str) -> None:
    reference = build()
    optimizer = adamw(reference)
    if how == "WarmupLR":
        rates = [0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01]  # the schedule counts from -1, as DeepSpeed's does
        optimizer.param_groups[0]["lr"] = rates[0]
        coming = iter(rates[1:])
        plain(reference, optimizer, 0, 5, after=lambda: optimizer.param_groups[0].update(lr=next(coming)))
    else:
        rates = [LR, LR, LR / 2, LR / 2, LR / 4]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        plain(reference, optimizer, 0, 5, after=scheduler.step)
    seen = run_ranks(scheduled, RANKS, how, 2)[0]
    assert seen["rates"] == pytest.approx(rates[:5], rel=1e-12, abs=1e-15) and seen["last"]
    assert distance(seen["weights"], weights(reference)) <= 1e-12


def test_a_schedule_moves_at_the_boundary_of_accumulation_only(alone: None) -> None:
    engine = start(1, scheduler=STEP, gradient_accumulation_steps=2)
    rates = []
    for number in range(8):
        rates.append(engine.get_lr()[0])
        train(engine, number, number + 1)
    assert rates == [LR] * 4 + [LR / 2] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": lambda parameters: "no optimizer"}, ["optimizer", "torch.optim.Optimizer", "str"]),
        ({"lr_scheduler": 3}, ["lr_scheduler", "int"]),
        ({"model": "a model"}, ["model", "torch.nn.Module", "str"]),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(arguments: dict[str, Any], words: list[str], alone: None) -> None:
    call = {"model": build(), "config": config(1), **arguments}
    message = outcome(lambda: zero_core.initialize(**call))
    assert message.startswith("UsageError") and all(word in message for word in words), message


def test_a_scheduler_without_an_optimizer_is_refused(alone: None) -> None:
    settings = {**without(config(1), "optimizer"), "scheduler": WARMUP}
    message = outcome(lambda: zero_core.initialize(model=build(), config=settings))
    assert message.startswith("UsageError") and "no optimizer" in message
