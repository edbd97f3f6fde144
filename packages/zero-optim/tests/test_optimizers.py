"""Each optimizer on its own, against its paper or torch's own parts; what needs an engine is tested in zero-core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_optim
from zero_optim import Lamb, Lion, MuonWithAdam, OneBitAdam, OneBitLamb, ZeroOneAdam

KINDS: list[Callable[[Any], torch.optim.Optimizer]] = [
    Lion,
    Lamb,
    lambda parameters: MuonWithAdam([{"params": list(parameters), "use_muon": False}]),
    OneBitAdam,
    OneBitLamb,
    ZeroOneAdam,
]


def three() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(2, 2))]


def with_gradients(parameters: list[nn.Parameter], step: int) -> list[nn.Parameter]:
    """Give all but the last parameter a gradient."""
    generator = torch.Generator().manual_seed(step)
    for p in parameters[:-1]:
        p.grad = torch.randn(p.shape, generator=generator)
    return parameters


def test_lion_is_the_papers_algorithm() -> None:
    ours, lr, decay, (b1, b2) = three(), 0.01, 0.1, (0.9, 0.99)
    optimizer = Lion(ours, lr, (b1, b2), decay)
    theirs = [p.detach().clone() for p in ours]
    moments = [torch.zeros_like(p) for p in theirs]
    for step in range(4):
        gradients = [p.grad for p in with_gradients(ours, step)]
        optimizer.step()
        for p, m, g in zip(theirs, moments, gradients, strict=True):
            if g is not None:
                p.sub_(lr * ((b1 * m + (1 - b1) * g).sign() + decay * p))
                m.copy_(b2 * m + (1 - b2) * g)
    for p, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="torch.optim.Muon came with torch 2.9")
def test_muon_takes_matrices_that_are_no_embedding_unless_a_parameter_says_otherwise() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "one": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    model["other"].weight.use_muon = False
    arguments = {"lr": 0.1, "momentum": 0.9, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = MuonWithAdam.from_model(model, list(model.parameters()), arguments)
    by_kind = {group["use_muon"]: group["params"] for group in optimizer.param_groups}
    assert [p is model["one"].weight for p in by_kind[True]] == [True] and len(by_kind[False]) == 4


@pytest.mark.skipif(torch.__version__ >= (2, 9), reason="from torch 2.9 on there is a torch.optim.Muon")
def test_before_torch_2_9_muon_is_refused_by_name_and_the_rest_is_not() -> None:
    with pytest.raises(ImportError, match="Muon needs torch 2.9 or later, this is torch 2.8"):
        MuonWithAdam([{"params": three(), "use_muon": True}])
    assert len(MuonWithAdam([{"params": three(), "use_muon": False}]).param_groups) == 1


@pytest.mark.parametrize("kind", [Lamb, OneBitLamb])
def test_the_relatives_of_adam_share_their_hyperparameters(kind: Any) -> None:
    (group,) = kind(three(), 0.5, betas=[0.8, 0.9], eps=1e-3, max_coeff=4.0).param_groups
    assert group["lr"] == 0.5 and group["betas"] == (0.8, 0.9) and group["eps"] == 1e-3 and group["max_coeff"] == 4.0
    assert group["weight_decay"] == 0.0 and group["bias_correction"] is True
    with pytest.raises(TypeError, match="epsilon"):
        kind(three(), epsilon=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_runs_the_closure_with_gradients_and_leaves_out_who_has_none(kind: Any) -> None:
    parameters = three()
    before = [p.detach().clone() for p in parameters]
    optimizer = kind(parameters)

    def closure() -> float:
        assert torch.is_grad_enabled()
        with_gradients(parameters, 0)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert [torch.equal(p, was) for p, was in zip(parameters, before, strict=True)] == [False, False, True]


def test_the_schedules_of_0_1_adam_are_those_of_a_counter() -> None:
    optimizer = ZeroOneAdam(
        [nn.Parameter(torch.zeros(1))],
        var_freeze_step=200,
        var_update_scaler=3,
        local_step_scaler=5,
        local_step_clipper=8,
    )
    every, updates, total = 1, 0, 0
    for step in range(1, 260):
        if step <= 200 and step % every == 0:
            total, updates = total + 1, updates + 1
            if updates == 3:
                every, updates = every * 2, 0
        assert optimizer.variance_steps(step) == total
        expected = 1 if step <= 200 else min(8, 2 ** ((step - 201) // 5))
        assert optimizer.interval(step) == expected


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (OneBitAdam, "freeze_step"),
        (OneBitLamb, "freeze_step"),
        (ZeroOneAdam, "var_freeze_step"),
        (ZeroOneAdam, "var_update_scaler"),
        (ZeroOneAdam, "local_step_scaler"),
        (ZeroOneAdam, "local_step_clipper"),
    ],
)
def test_a_variance_that_would_never_exist_is_refused_by_name(kind: Any, name: str) -> None:
    for value in (0, -3):
        with pytest.raises(ValueError, match=f"{kind.__name__}: {name}: expected 1 or more, got {value}"):
            kind(three(), **{name: value})
    parameters = three()
    optimizer = kind(parameters, **{name: 1})
    for step in range(4):
        with_gradients(parameters, step)
        optimizer.step()
    assert all(p.isfinite().all() for p in parameters)


def test_every_public_name_is_listed_and_documented() -> None:
    assert zero_optim.__all__ == sorted(zero_optim.__all__)
    assert all(getattr(zero_optim, name).__doc__ for name in zero_optim.__all__)


def test_lamb_steps_the_same_whatever_the_strides_of_its_states() -> None:
    plain, strided = three()[0], three()[0]
    optimizers = [Lamb([p], 0.1, weight_decay=0.1) for p in (plain, strided)]
    for step in range(3):
        for p, optimizer in zip((plain, strided), optimizers, strict=True):
            with_gradients([p, p], step)
            optimizer.step()
            for key in ("exp_avg", "exp_avg_sq"):
                if p is strided:
                    optimizer.state[p][key] = optimizer.state[p][key].t().contiguous().t()
    assert torch.allclose(plain, strided, rtol=1e-6)


def test_an_interval_without_a_learning_rate_keeps_the_momentum() -> None:
    (p,) = parameters = [nn.Parameter(torch.ones(6))]
    optimizer = ZeroOneAdam(parameters, 0.1, var_freeze_step=2, local_step_scaler=1, local_step_clipper=4)
    for step in range(12):
        p.grad = torch.ones(6)
        optimizer.param_groups[0]["lr"] = 0.1 if step < 4 else 0.0
        optimizer.step()
        assert optimizer.state[p]["exp_avg"].min() > 0, step


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Five quintic iterations towards the nearest orthogonal matrix, in the dtype of ``matrix``."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x if wide else x.T


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("shape", [(24, 24), (64, 24), (128, 512)])
def test_muon_is_as_near_to_exact_iterations_as_bfloat16_allows(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, rate, beta, decay = nn.Linear(shape[1], shape[0], bias=False), 0.02, 0.95, 0.1
    arguments = {"lr": rate, "momentum": beta, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay}
    optimizer = MuonWithAdam.from_model(model, list(model.parameters()), arguments)
    weight, momentum = model.weight.detach().double(), torch.zeros(shape, dtype=torch.float64)
    for _ in range(3):
        gradient = torch.randn(shape)
        model.weight.grad = gradient.clone()
        before = model.weight.detach().double()
        optimizer.step()
        momentum = momentum.lerp(gradient.double(), 1 - beta)
        update = newton_schulz(gradient.double().lerp(momentum, beta)) * max(1.0, shape[0] / shape[1]) ** 0.5
        expected = before * (1 - rate * decay) - rate * update
        deviation = (model.weight.detach().double() - expected).abs().max() / (rate * update.square().mean().sqrt())
        assert deviation < 0.25
        weight = weight * (1 - rate * decay) - rate * update
    drift = (model.weight.detach().double() - weight).abs().max() / (rate * update.square().mean().sqrt())
    assert 1e-3 < drift < 3 * 0.25  # more than float32 would leave: what the page says is why it is not 1e-5
