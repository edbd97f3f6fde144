"""Optimizers without a kernel of ours, with their states on the host or on NVMe: torch steps them there."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_comm import run_ranks

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, t0=2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
}


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, without a kernel; it counts no steps."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["average"] = state["average"] * 0.9 + p.grad if "average" in state else p.grad.clone()
                    p.sub_(state["average"], alpha=group["lr"])


WITHOUT_STEPS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Momentum": Momentum,
}
BATCH, STEPS, HALF = 6, 6, 3


def build(width: int = 120) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(70, width), nn.Tanh(), nn.Linear(width, 5)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, 70, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two param groups, the biases with a learning rate of their own."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if n.endswith("weight")]},
        {"params": [p for n, p in named.items() if n.endswith("bias")], "lr": 2e-2},
    ]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def plain(name: str) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = {**OPTIMIZERS, **WITHOUT_STEPS}[name](groups(model))
    scheduler = schedule(optimizer)
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def start(name: str, stage: int, offload: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    import zero_core

    model = build(400).float() if more else build()  # then more slices than a tier has buffers
    zero = {"stage": stage, "offload_optimizer": offload, "sub_group_size": 4096, "unit_min_numel": 1}
    config = {"train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(), "zero_optimization": zero, **more}
    optimizer = {**OPTIMIZERS, **WITHOUT_STEPS}[name](groups(model))
    engine, *_ = zero_core.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule(optimizer), config=config)
    return engine, optimizer


def train(engine: Any, first: int, last: int, dtype: torch.dtype = torch.float64) -> None:
    for step in range(first, last):
        mine = batch(step).to(dtype).chunk(dist.get_world_size())[dist.get_rank()]
        engine.backward(engine(mine).square().mean())
        engine.step()


def values(engine: Any) -> dict[str, torch.Tensor]:
    return {n: engine.full_param(p).clone() for n, p in engine.module.named_parameters()}


def trained(name: str, stage: int, offload: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    engine, optimizer = start(name, stage, offload)
    train(engine, 0, STEPS)
    found, kinds = values(engine), sorted({kind for state in optimizer.state.values() for kind in state})
    engine.destroy()
    return found, kinds


def saved(name: str, stage: int, offload: dict[str, Any], folder: str) -> None:
    engine, _ = start(name, stage, offload)
    train(engine, 0, HALF)
    engine.save_checkpoint(folder)
    engine.destroy()


def resumed(name: str, stage: int, offload: dict[str, Any], folder: str, begun: bool = True) -> dict[str, torch.Tensor]:
    engine, _ = start(name, stage, offload)
    if begun:
        train(engine, 0, 1)  # leaves states that must not survive
    engine.load_checkpoint(folder)
    train(engine, HALF, STEPS)
    found = values(engine)
    engine.destroy()
    return found


def tiers(folder: Path, **more: Any) -> dict[str, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    nvme = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 3, "ratio": 0.6, **more}
    return {"host": {"device": "cpu"}, "nvme": nvme}


@pytest.mark.parametrize(
    ("name", "stage", "ranks"), [(name, 1 + i % 3, 1 + i // 3 % 3) for i, name in enumerate(OPTIMIZERS)]
)
def test_they_train_as_plain_torch_does(name: str, stage: int, ranks: int, tmp_path: Path) -> None:
    expected = plain(name)
    on_device = run_ranks(trained, ranks, name, stage, {"device": "none"})[0]
    for tier, offload in tiers(tmp_path).items():
        found, kinds = run_ranks(trained, ranks, name, stage, offload)[0]
        assert kinds == on_device[1], tier
        for parameter, value in found.items():
            assert torch.equal(value, on_device[0][parameter]), (tier, parameter)
            assert (value - expected[parameter]).abs().max() < 1e-12, (tier, parameter)


def saved_between_steps(name: str, stage: int, offload: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    engine, _ = start(name, stage, offload, bf16={"enabled": True})
    for step in range(STEPS):
        train(engine, step, step + 1, torch.bfloat16)
        engine.save_checkpoint(folder, tag=f"step{step}")
        values(engine)  # reads the masters
    found = values(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize(("name", "stage", "ranks"), [("RMSprop", 1, 1), ("NAdam", 3, 2)])
def test_bf16_weights_with_masters_on_a_tier_have_the_bits_of_the_device(
    name: str, stage: int, ranks: int, tmp_path: Path
) -> None:
    expected = run_ranks(saved_between_steps, ranks, name, stage, {"device": "none"}, str(tmp_path / "none"))[0]
    for tier, offload in tiers(tmp_path / "drive", buffer_count=4, ratio=1.0).items():
        found = run_ranks(saved_between_steps, ranks, name, stage, offload, str(tmp_path / tier))[0]
        for parameter, value in found.items():
            assert torch.equal(value, expected[parameter]), (tier, parameter)


@pytest.mark.parametrize("name", ["NAdam", "ASGD", "Rprop"])  # which keep numbers and first values of their own
def test_their_checkpoints_load_on_any_tier_and_number_of_ranks(name: str, tmp_path: Path) -> None:
    places = {"device": {"device": "none"}, **tiers(tmp_path / "drive")}
    expected = plain(name)
    for source, target, ranks in (("device", "host", 2), ("nvme", "device", 1), ("host", "nvme", 3)):
        folder = str(tmp_path / f"{source}-{target}")
        run_ranks(saved, 2, name, 2, places[source], folder)
        for parameter, value in run_ranks(resumed, ranks, name, 3, places[target], folder)[0].items():
            assert (value - expected[parameter]).abs().max() < 1e-12, (source, target, parameter)


@pytest.mark.parametrize("name", WITHOUT_STEPS)
def test_momentum_of_optimizers_that_count_no_steps_is_loaded_on_a_tier(name: str, tmp_path: Path) -> None:
    expected = plain(name)
    run_ranks(saved, 2, name, 2, {"device": "none"}, str(tmp_path / "saved"))
    for tier, offload in tiers(tmp_path / "drive").items():
        for parameter, value in run_ranks(resumed, 2, name, 2, offload, str(tmp_path / "saved"))[0].items():
            assert (value - expected[parameter]).abs().max() < 1e-12, (tier, parameter)


@pytest.mark.parametrize(
    ("name", "stage", "ranks"), [(name, 1 + i % 3, 1 + i // 3 % 3) for i, name in enumerate(OPTIMIZERS)]
)
def test_a_new_engine_goes_on_from_their_checkpoints(name: str, stage: int, ranks: int, tmp_path: Path) -> None:
    expected = plain(name)
    for tier, offload in tiers(tmp_path / "drive").items():
        run_ranks(saved, ranks, name, stage, offload, str(tmp_path / tier))
        found = run_ranks(resumed, ranks, name, stage, offload, str(tmp_path / tier), False)[0]
        for parameter, value in found.items():
            assert (value - expected[parameter]).abs().max() < 1e-12, (tier, parameter)


class Counting(torch.optim.SGD):
    """SGD whose steps change a value of its own."""

    elementwise = True
    taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        super().step(closure)


def refused(kind: str, zero: dict[str, Any], more: dict[str, Any]) -> str:
    import zero_core

    model = build().float()
    known = {"Counting": Counting, "Muon": getattr(torch.optim, "Muon", None)}
    try:
        optimizer = known.get(kind, getattr(torch.optim, kind, None))([p for p in model.parameters() if p.dim() == 2])
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **more}
        zero_core.initialize(model=model, optimizer=optimizer, config=config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("kind", "offload", "more", "words"),
    [
        ("Adafactor", {}, {}, ["PartitionError", "Adafactor looks at full parameters", 'device to "none"']),
        ("Counting", {}, {}, ["UsageError", "Counting changes 'taken' in a step"]),
        ("RMSprop", {}, {"offload": {"state_dtype": "bf16"}}, ["UsageError", "state_dtype", "RMSprop"]),
        ("RMSprop", {}, {"offload": {"delayed_update": True}}, ["UsageError", "RMSprop", "delayed_update"]),
        ("RMSprop", {"overlap": "exact"}, {}, ["UsageError", "RMSprop", "overlap"]),
    ],
)
def test_what_the_host_cannot_step_is_refused_by_name(
    kind: str, offload: dict[str, Any], more: dict[str, Any], words: list[str]
) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", **offload}}
    for message in run_ranks(refused, 2, kind, zero, more):
        assert all(word in message for word in words), message


def lines_of(kind: str) -> list[str]:
    """What a run over ``kind`` says to a program that has set up logging."""
    import zero_core

    said = io.StringIO()
    logger = logging.getLogger("zero_core")
    logger.addHandler(handler := logging.StreamHandler(said))
    logger.setLevel(logging.INFO)
    model = build().float()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    optimizer = getattr(torch.optim, kind)(model.parameters())
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(batch(0).float()).mean())
    engine.step()
    engine.destroy()
    logger.removeHandler(handler)
    return said.getvalue().splitlines()


def test_a_run_says_once_that_torch_steps_on_the_host() -> None:
    for kind, times in (("RMSprop", 1), ("AdamW", 0)):
        said = [line for lines in run_ranks(lines_of, 2, kind) for line in lines]
        assert sum(f"{kind} has no CPU kernel; torch steps it on the host" in line for line in said) == times
