"""A torch optimizer over fragments: what it refuses, what stays live, what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from partition_models import Stack, cut, make, tokens
from torch import nn
from torch.optim.lr_scheduler import StepLR

from zero_comm import run_ranks
from zero_partition import NonFiniteGradientError, PartitionError, ShardedOptimizer, full_parameter, full_state
from zero_precision import DynamicLossScale

STAGES = [0, 1, 2, 3]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        model(tokens(step)).backward()
        optimizer.step()
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.zero_grad()


def test_a_parameter_of_another_model_is_refused_by_its_place() -> None:
    model = make()
    stranger = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [stranger]}], lr=0.1)
    parts = cut(model, 1)
    with pytest.raises(PartitionError, match=r"param_groups\[1\]\['params'\]\[0\] \(shape \(2, 3\)\) does not belong"):
        ShardedOptimizer(optimizer, parts)


def test_a_parameter_listed_twice_is_refused_by_its_place() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"].append(model.norm.weight)
    with pytest.raises(
        PartitionError, match=r"param_groups\[0\]\['params'\]\[\d+\] \(shape \(7,\)\) is in the optimizer twice"
    ):
        ShardedOptimizer(optimizer, cut(model, 1))


class ModelNormDescent(torch.optim.Optimizer):
    """Divides by the norm of all gradients together."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.square().sum()) for p in trained) ** 0.5
        for p in trained:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("make_optimizer", [ModelNormDescent, torch.optim.LBFGS])
def test_optimizers_that_a_part_of_the_model_would_change_are_refused_by_name(
    make_optimizer: Callable[[Any], Any],
) -> None:
    model = make()
    optimizer = make_optimizer(model.parameters())
    with pytest.raises(PartitionError, match=type(optimizer).__name__):
        ShardedOptimizer(optimizer, cut(model, 2))


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Over the matrices only: the rest of the model stays as it is. Muon came with torch 2.9."""
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.05)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


def whole_parameters(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], stage: int) -> dict[str, Any]:
    """What an optimizer that needs whole matrices does on this rank, beside one process."""
    reference, model = make(), make()
    expected, inner = make_optimizer(reference), make_optimizer(model)
    parts = cut(model, stage, trainable=[p for group in inner.param_groups for p in group["params"]])
    optimizer = ShardedOptimizer(inner, parts, clip=0.05)
    for step in range(4):
        train_one(model, optimizer, step)
        reference(tokens(step)).backward()
        torch.nn.utils.clip_grad_norm_([p for group in expected.param_groups for p in group["params"]], 0.05)
        expected.step()
        reference.zero_grad()
    names = dict(model.named_parameters())
    result = {
        "deviation": max(
            float((full_parameter(parts, names[n]) - p).abs().max()) for n, p in reference.named_parameters()
        ),
        "updated here": [o.fragment.entry.name for o in optimizer.fragments],
        "listed": sum(len(group["params"]) for group in expected.param_groups),
        "resident": sum(o.tensor.untyped_storage().nbytes() for o in optimizer.fragments),
    }
    if make_optimizer is muon:
        weight = names["blocks.1.0.weight"]
        moment = full_state(parts, optimizer, weight, "momentum_buffer")
        theirs = expected.state[reference.blocks[1][0].weight]["momentum_buffer"]
        result["moment"] = float((moment - theirs).abs().max())
    return result


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make_optimizer", [adafactor] if torch.__version__ < (2, 9) else [muon, adafactor])
def test_optimizers_of_whole_matrices_follow_one_process_at_every_stage(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], stage: int
) -> None:
    results = run_ranks(whole_parameters, 3, make_optimizer, stage)
    for result in results:
        assert result["deviation"] < 1e-12 and result.get("moment", 0.0) < 1e-12
    if stage:
        updated = [name for result in results for name in result["updated here"]]
        assert len(updated) == len(set(updated)) == results[0]["listed"]  # each parameter has one owner
        assert all(result["updated here"] for result in results)  # and no rank is idle
        assert all(result["resident"] <= 8 * len(result["updated here"]) for result in results)  # placeholders


class Normed(torch.optim.Optimizer):
    """Descent along each parameter's gradient, divided by its norm; wants the norms from outside."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.reduce_norms: Callable[[Any], list[tuple[float, ...]]] = lambda partial: [norms for _, norms in partial]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = self.reduce_norms([(p, (float(p.grad.square().sum()),)) for p in trained])
        for p, (square,) in zip(trained, norms, strict=True):
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / square**0.5)


def with_norms(stage: int) -> tuple[float, list[float]]:
    reference, model = make(), make()
    expected = Normed(reference.parameters())
    parts = cut(model, stage)
    optimizer = ShardedOptimizer(Normed(model.parameters()), parts)
    for step in range(4):
        train_one(model, optimizer, step)
        train_one(reference, expected, step)
    wholes = [full_parameter(parts, p) for p in model.parameters()]
    pairs = zip(wholes, reference.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs), torch.cat([w.flatten() for w in wholes]).tolist()


def test_norms_of_whole_parameters_are_added_up_over_ranks_alike_at_stages_with_shards() -> None:
    results = [run_ranks(with_norms, 3, stage) for stage in STAGES]
    assert all(deviation < 1e-12 for ranks in results for deviation, _ in ranks)
    assert all(values == results[0][0][1] for _, values in results[0])  # of full parameters, without a sum over ranks
    assert all(values == results[1][0][1] for ranks in results[1:] for _, values in ranks)


def live_groups(stage: int) -> dict[str, Any]:
    model, reference = make(), make()
    inner, expected = sgd(model.parameters()), sgd(reference.parameters())
    dictionary = inner.param_groups[0]
    parts = cut(model, stage)
    optimizer = ShardedOptimizer(inner, parts)
    schedule, expected_schedule = StepLR(inner, 1, gamma=0.5), StepLR(expected, 1, gamma=0.5)
    for step in range(4):
        train_one(model, optimizer, step)
        train_one(reference, expected, step)
        schedule.step()
        expected_schedule.step()
        if step == 1:
            optimizer.param_groups[0]["lr"] = expected.param_groups[0]["lr"] = 0.01
    names = dict(model.named_parameters())
    wholes = {name: full_parameter(parts, p) for name, p in names.items()}
    moments = {name: full_state(parts, optimizer, p, "momentum_buffer") for name, p in names.items()}
    return {
        "same dictionary": inner.param_groups[0] is dictionary and optimizer.param_groups is inner.param_groups,
        "weights": max(float((wholes[n] - p).abs().max()) for n, p in reference.named_parameters()),
        "moments": max(
            float((moments[n] - expected.state[p]["momentum_buffer"]).abs().max())
            for n, p in reference.named_parameters()
        ),
        "elements": sum(o.fragment.length for o in optimizer.fragments),
        "all": sum(p.numel() for p in reference.parameters()),
    }


def train_one(model: nn.Module, optimizer: Any, step: int) -> None:
    model(tokens(step)).backward()
    optimizer.step()
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_param_groups_stay_the_users_and_schedulers_and_written_rates_act(stage: int) -> None:
    results = run_ranks(live_groups, 2, stage)
    for result in results:
        assert result["same dictionary"] and result["weights"] < 1e-12 and result["moments"] < 1e-12
    copies = 2 if stage == 0 else 1
    assert sum(result["elements"] for result in results) == copies * results[0]["all"]


def with_history(stage: int) -> float:
    """An optimizer that has trained before the model was cut continues with its state."""
    model, reference = make(), make()
    inner, expected = torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(reference.parameters(), lr=0.01)
    train(model, inner, 2)
    train(reference, expected, 4)
    parts = cut(model, stage)
    optimizer = ShardedOptimizer(inner, parts)
    for step in (2, 3):
        train_one(model, optimizer, step)
    wholes = [full_parameter(parts, p) for p in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(wholes, reference.parameters(), strict=True))


@pytest.mark.parametrize("stage", [0, 3])
def test_state_from_before_the_cut_is_kept(stage: int) -> None:
    assert max(run_ranks(with_history, 2, stage)) < 1e-12


def groups_and_frozen() -> float:
    """Two groups with different rates, a frozen parameter, and one that no group lists."""

    def optimizer_of(model: Stack) -> torch.optim.Optimizer:
        model.blocks[0][0].weight.requires_grad_(False)
        decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and p.requires_grad]
        others = [p for n, p in model.named_parameters() if p.dim() == 1 and n != "norm.bias"]
        return torch.optim.AdamW(
            [{"params": decayed, "lr": 0.02, "weight_decay": 0.3}, {"params": others, "lr": 0.005}]
        )

    model, reference = make(), make()
    inner, expected = optimizer_of(model), optimizer_of(reference)
    parts = cut(model, 3, trainable=[p for g in inner.param_groups for p in g["params"]])
    optimizer = ShardedOptimizer(inner, parts)
    train(model, optimizer, 3)
    for step in range(3):
        reference(tokens(step)).backward()
        expected.step()
        reference.zero_grad()
    wholes = [full_parameter(parts, p) for p in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(wholes, reference.parameters(), strict=True))


def test_groups_keep_their_own_hyperparameters_and_what_no_group_lists_does_not_move() -> None:
    assert max(run_ranks(groups_and_frozen, 2)) < 1e-12


def clipped(stage: int) -> tuple[float, float, float]:
    model, reference = make(), make()
    parts = cut(model, stage)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), parts, clip=0.01)
    expected = torch.optim.SGD(reference.parameters(), lr=1.0)
    reference(tokens()).backward()
    norm = float(nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
    expected.step()
    model(tokens()).backward()
    found = optimizer.step()
    wholes = [full_parameter(parts, p) for p in model.parameters()]
    return (
        found.norm,
        norm,
        max(float((a - b).abs().max()) for a, b in zip(wholes, reference.parameters(), strict=True)),
    )


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_is_by_the_global_norm_as_torch_clips(stage: int) -> None:
    for found, expected, deviation in run_ranks(clipped, 3, stage):
        assert found == pytest.approx(expected, rel=1e-12) and expected > 0.01 and deviation < 1e-12


def too_large_to_square(stage: int) -> str:
    model = make()
    optimizer = ShardedOptimizer(sgd(model.parameters()), cut(model, stage))
    (model(tokens()) * 1e200).backward()
    with pytest.raises(NonFiniteGradientError) as refused:
        optimizer.step()
    return str(refused.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_finite_gradients_whose_squares_overflow_are_said_to_be_finite(stage: int) -> None:
    for text in run_ranks(too_large_to_square, 2, stage):
        assert "norm of step 0 is inf: every gradient is finite" in text and "''" not in text


def not_finite(stage: int) -> tuple[str, float]:
    """Only rank 1 sees a batch whose gradient is not finite."""
    model = make()
    before = [p.detach().clone() for p in model.parameters()]
    parts = cut(model, stage)
    optimizer = ShardedOptimizer(sgd(model.parameters()), parts)
    loss = model(tokens())
    (loss * (math.inf if parts.rank == 1 else 1.0)).backward()
    try:
        optimizer.step()
    except NonFiniteGradientError as error:
        text = str(error)
    wholes = [full_parameter(parts, p) for p in model.parameters()]
    moved = max(float((a - b).abs().max()) for a, b in zip(wholes, before, strict=True))
    train_one(model, optimizer, 1)  # and training continues
    return text, moved


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_on_one_rank_raises_on_all_by_name_and_changes_nothing(stage: int) -> None:
    texts = []
    for text, moved in run_ranks(not_finite, 2, stage):
        assert moved == 0.0 and "belongs to parameter '" in text
        texts.append(text)
    assert texts[0] == texts[1]


def test_an_overflow_under_a_loss_scale_skips_the_step_and_lowers_the_scale() -> None:
    model = make()
    parts = cut(model, 2)
    scale = DynamicLossScale(initial_scale_power=4, hysteresis=1)
    optimizer = ShardedOptimizer(sgd(model.parameters()), parts, loss_scale=scale)
    before = [p.detach().clone() for p in model.parameters()]
    (model(tokens()) * math.nan).backward()
    result = optimizer.step()
    assert not result.taken and scale.scale == 8.0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    (model(tokens()) * scale.scale).backward()
    assert optimizer.step().taken


class Own(torch.optim.Optimizer):
    """An optimizer of a user's; ``rule`` writes one parameter from its gradient in its n-th step."""

    def __init__(self, params: Any, rule: Callable[[torch.Tensor, torch.Tensor, int], None]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    self.rule(p, p.grad, state["step"])


def normed_late(p: torch.Tensor, grad: torch.Tensor, step: int) -> None:
    """A norm after a warm-up, which two steps on small matrices do not show."""
    p.sub_(grad / grad.norm() if step > 2 else grad, alpha=0.1)


def by_size(p: torch.Tensor, grad: torch.Tensor, step: int) -> None:
    """Another rule for larger parameters, which matrices of 6 x 4 do not show."""
    p.sub_(grad.sign() if p.numel() > 24 else grad, alpha=0.1)


def assigned(p: torch.Tensor, grad: torch.Tensor, step: int) -> None:
    """New memory for every parameter in each step."""
    p.data = p.data - 0.1 * grad


def with_rule(stage: int, rule: Any) -> float:
    reference, model = make(), make()
    expected = Own(reference.parameters(), rule)
    parts = cut(model, stage)
    optimizer = ShardedOptimizer(Own(model.parameters(), rule), parts)
    for step in range(5):
        train_one(model, optimizer, step)
        train_one(reference, expected, step)
    pairs = zip((full_parameter(parts, p) for p in model.parameters()), reference.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("rule", [normed_late, by_size, assigned])
@pytest.mark.parametrize("world", [1, 3])
def test_what_a_users_optimizer_does_with_full_parameters_is_done(world: int, rule: Any) -> None:
    for stage in STAGES:
        assert max(run_ranks(with_rule, world, stage, rule)) < 1e-12, stage
