"""The offloaded optimizer follows torch's, and every tier does the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zero_offload import OffloadedOptimizer
from zero_optim_kernels.torch import CPULion

Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.01},
    "AdamW": {"lr": 1e-2, "betas": (0.8, 0.99), "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "Adagrad": {"lr": 1e-2, "lr_decay": 1e-3, "initial_accumulator_value": 0.1},
}


class Net(nn.Module):
    """Tied, frozen, sometimes unused and zero-dimensional parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, 48)
        self.frozen = nn.Linear(48, 48)
        self.hidden = nn.Linear(48, 210)
        self.back = nn.Linear(210, 48)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.rare = nn.Linear(48, 48)
        self.never = nn.Linear(3, 3)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.head = nn.Linear(48, 97, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, rare: bool) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens))
        x = x + self.gain * self.back(torch.nn.functional.gelu(self.hidden(x)))
        return self.head(self.rare(x) if rare else x)


def train(
    make: Make, *, steps: int, dtype: torch.dtype = torch.float32, clip: float | None = None, accumulate: int = 1
) -> torch.Tensor:
    torch.manual_seed(3)
    model = Net().to(dtype)
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.05 * step))
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            tokens = torch.randint(0, 97, (4, 11))
            logits = model(tokens, rare=step % 3 == 1)
            loss = nn.functional.cross_entropy(logits.float().view(-1, 97).to(logits.dtype), tokens.view(-1).roll(1))
            (loss / accumulate).backward()
        if clip is not None and isinstance(optimizer, OffloadedOptimizer):
            optimizer.clip_grad_norm_(clip)
        elif clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.close()
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def deviation(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_fifty_steps_follow_torch(name: str, clip: float | None) -> None:
    kind = getattr(torch.optim, name)
    want = train(lambda m: kind(m.parameters(), **OPTIONS[name]), steps=50, clip=clip, accumulate=2)
    got = train(lambda m: OffloadedOptimizer(m, kind, **OPTIONS[name]), steps=50, clip=clip, accumulate=2)
    assert deviation(got, want) < 1e-6


@pytest.mark.parametrize("name", OPTIONS)
def test_fifty_steps_in_double_follow_torch_to_the_last_digits(name: str) -> None:
    kind = getattr(torch.optim, name)
    want = train(lambda m: kind(m.parameters(), **OPTIONS[name]), steps=50, dtype=torch.float64)
    got = train(lambda m: OffloadedOptimizer(m, name, **OPTIONS[name]), steps=50, dtype=torch.float64)
    assert deviation(got, want) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_tiers_slices_buffers_and_gradient_offload_do_not_change_a_bit(
    tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    ways: dict[str, dict[str, Any]] = {
        "small slices": {"sub_group_size": 4096},
        "gradients offloaded": {"gradients": "host"},
        "nvme": {"tier": "nvme", "path": tmp_path / "a", "sub_group_size": 4096, "buffer_count": 3, "verify": True},
        "nvme, one buffer": {"tier": "nvme", "path": tmp_path / "b", "sub_group_size": 5000, "buffer_count": 1},
        "nvme, striped": {"tier": "nvme", "path": [tmp_path / "c", tmp_path / "d"], "gradients": "host"},
        "nvme, gradients too": {"tier": "nvme", "path": tmp_path / "e", "gradients": "nvme", "buffer_count": 2},
        "a part of it": {"tier": "nvme", "path": tmp_path / "f", "ratio": 0.37, "sub_group_size": 4096},
        "no overlap": {"tier": "nvme", "path": tmp_path / "g", "pipeline_read": False, "pipeline_write": False},
    }
    results = {
        way: train(
            lambda m, o=options: OffloadedOptimizer(m, name, **OPTIONS[name], **o),  # type: ignore[misc]
            steps=4,
            dtype=dtype,
            clip=0.5,
            accumulate=2,
        )
        for way, options in {"host": {}, **ways}.items()
    }
    for way in ways:
        assert torch.equal(results[way], results["host"]), way


def test_sixteen_bit_weights_follow_a_float32_master() -> None:
    """Steps too small for bfloat16 add up in the master until the weight moves."""
    weight = nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
    with OffloadedOptimizer([weight], "SGD", lr=1.0) as optimizer:
        for _ in range(10):
            weight.grad = torch.full_like(weight, 2**-11)
            optimizer.step()
        assert torch.equal(weight.detach(), torch.full_like(weight, 1 - 10 * 2**-11))
        assert float(optimizer.state_dict()["state"][0]["master"][0]) == 1 - 10 * 2**-11


def test_lion_is_there_by_name_and_class(tmp_path: Path) -> None:
    want = train(lambda m: CPULion([p for p in m.parameters() if p.requires_grad], lr=1e-3), steps=5)
    for kind in ("lion", CPULion):
        assert torch.equal(train(lambda m, k=kind: OffloadedOptimizer(m, k, lr=1e-3), steps=5), want)  # type: ignore[misc]


def test_parameter_groups_have_their_own_options() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        return [{"params": matrices, "weight_decay": 0.3}, {"params": others, "lr": 3e-3, "betas": (0.5, 0.9)}]

    want = train(lambda m: torch.optim.AdamW(groups(m), lr=1e-2), steps=10)
    got = train(lambda m: OffloadedOptimizer(groups(m), lr=1e-2), steps=10)
    assert deviation(got, want) < 1e-6


def test_maximize_and_a_tensor_learning_rate_are_understood() -> None:
    want = train(lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2), maximize=True), steps=3)
    got = train(lambda m: OffloadedOptimizer(m, lr=torch.tensor(1e-2), maximize=True), steps=3)
    assert deviation(got, want) < 1e-6


def test_the_loss_scale_is_taken_out_in_the_same_pass() -> None:
    results = []
    for scale in (1.0, 1024.0):
        weight = nn.Parameter(torch.linspace(-1, 1, 9000))
        with OffloadedOptimizer([weight], lr=0.1) as optimizer:
            for _ in range(3):
                optimizer.zero_grad()
                (weight.square().sum() * scale).backward()
                norm = optimizer.clip_grad_norm_(1.0, grad_scale=1 / scale)
                optimizer.step(grad_scale=1 / scale)
        results.append((norm, weight.detach().clone()))
    assert results[0][0] == pytest.approx(results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_offloaded_gradients_leave_the_device_and_still_add_up() -> None:
    weight = nn.Parameter(torch.ones(10))
    with OffloadedOptimizer([weight], "SGD", lr=1.0, gradients="host") as optimizer:
        for _ in range(3):
            weight.sum().backward()
            assert weight.grad is None
        assert optimizer.clip_grad_norm_(1e9) == pytest.approx((10 * 9) ** 0.5)
        optimizer.step()
        assert torch.equal(weight.detach(), torch.full((10,), -2.0))
        optimizer.zero_grad()
        optimizer.step()
        assert torch.equal(weight.detach(), torch.full((10,), -2.0))
    weight.sum().backward()
    assert weight.grad is not None


def test_weights_changed_between_steps_are_taken_over(tmp_path: Path) -> None:
    for options in ({}, {"tier": "nvme", "path": tmp_path, "sub_group_size": 4096, "buffer_count": 1}):
        weight = nn.Parameter(torch.full((10_000,), 1.0, dtype=torch.bfloat16))
        with OffloadedOptimizer([weight], "SGD", lr=1.0, **options) as optimizer:
            weight.grad = torch.full_like(weight, 2**-11)
            optimizer.step()
            with torch.no_grad():
                weight[5000:] = 8.0
            optimizer.step()
            master = optimizer.state_dict()["state"][0]["master"]
            assert torch.equal(master[:5000], torch.full((5000,), 1 - 2 * 2**-11))
            assert torch.equal(master[5000:], torch.full((5000,), 8 - 2**-11))


def test_a_closure_is_called_with_gradients_on() -> None:
    weight = nn.Parameter(torch.ones(3))
    with OffloadedOptimizer([weight], "SGD", lr=0.5) as optimizer:

        def closure() -> float:
            optimizer.zero_grad()
            loss = weight.sum()
            loss.backward()
            return float(loss.detach())

        assert optimizer.step(closure) == 3.0
        assert torch.equal(weight.detach(), torch.full((3,), 0.5))


def test_stale_graphs_are_noticed_as_with_torch() -> None:
    weight = nn.Parameter(torch.ones(3))
    with OffloadedOptimizer([weight], "SGD", lr=0.5) as optimizer:
        loss = weight.square().sum()
        weight.grad = torch.ones(3)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("way", ["scaler", "plain clip"])
def test_torch_tools_that_work_on_gradients_work(way: str) -> None:
    weight = nn.Parameter(torch.ones(5000))
    with OffloadedOptimizer([weight], "SGD", lr=1.0) as optimizer:
        if way == "scaler":
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            scaler.scale((weight * 0.25).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            (weight * 8).sum().backward()
            nn.utils.clip_grad_norm_([weight], 0.25 * 5000**0.5)
            optimizer.step()
    assert torch.allclose(weight.detach(), torch.full((5000,), 0.75))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "tier": ({"tier": "tape"}, ValueError, "expected 'host', 'nvme' or 'auto', got 'tape'"),
    "no path": ({"tier": "nvme"}, ValueError, "path: names the folder"),
    "path on host": ({"path": "x"}, ValueError, "path: names the folder"),
    "optimizer": ({"optimizer": "Rprop"}, ValueError, "Adagrad, Adam, AdamW, Lion or SGD.*Rprop"),
    "class": ({"optimizer": torch.optim.LBFGS}, ValueError, "got LBFGS"),
    "slices": ({"sub_group_size": 100}, ValueError, "expected 4096 elements or more, got 100"),
    "lr": ({"lr": -1.0}, ValueError, "Invalid learning rate"),
    "unknown option": ({"learning_rate": 1.0}, TypeError, "learning_rate"),
    "amsgrad": ({"amsgrad": True}, ValueError, "amsgrad=True is not supported by the offloaded AdamW"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    options, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        OffloadedOptimizer([nn.Parameter(torch.zeros(3))], **options)


def test_parameters_and_gradients_that_cannot_be_served_are_named() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Embedding(4, 2, sparse=True)})
    with OffloadedOptimizer(model) as optimizer:
        model["b"](torch.tensor([1])).sum().backward()
        with pytest.raises(TypeError, match="'b.weight': sparse gradients"):
            optimizer.step()
    model["a"].weight.requires_grad_(False)
    with OffloadedOptimizer(model["a"]) as optimizer:
        model["a"].weight.requires_grad_(True)
        model["a"](torch.ones(1, 2)).sum().backward()
        with pytest.raises(ValueError, match="did not require one when this optimizer was made"):
            optimizer.step()
        with pytest.raises(ValueError, match="cannot be added"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(TypeError, match="'w': expected float32, bfloat16 or float16"):
        OffloadedOptimizer([("w", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))])
    with pytest.raises(ValueError, match="'w': two parameters or shards have this name"):
        groups = [{"params": [("w", nn.Parameter(torch.zeros(2)))]} for _ in range(2)]
        OffloadedOptimizer(groups)
    strided = nn.Parameter(torch.zeros(4, 6).t())
    with OffloadedOptimizer([("s", strided)]) as optimizer:
        strided.sum().backward()
        with pytest.raises(ValueError, match="'s': expected a contiguous parameter"):
            optimizer.step()


def test_a_closed_optimizer_says_so() -> None:
    optimizer = OffloadedOptimizer([nn.Parameter(torch.zeros(3))])
    optimizer.close()
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()
