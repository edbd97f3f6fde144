"""What user code does to gradients (zero_grad, p.grad written, clipped) counts as in plain torch, or is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import gradient_scripts as scripts
import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import Run, bits, deviation

import zero_core
from zero_comm import run_ranks
from zero_partition import PartitionError

STAGES = (0, 1, 2, 3)
SOAK = pytest.mark.soak
Weights = dict[str, torch.Tensor]


def scripts_of(run: Run, stage: int) -> list[Any]:
    """Those that need a visible gradient come last, so that the others have run on the same weights at every stage."""
    if run.accumulation > 1:
        return [scripts.replaces_within_an_accumulation]
    return scripts.EVERY_STAGE + ([] if stage else scripts.WHERE_GRADIENTS_SHOW)


def results(trainer: Any, chosen: list[Any]) -> dict[str, Weights]:
    """The weights after each script, all of them on one model."""
    found = {}
    for script in chosen:
        script(trainer)
        found[script.__name__] = trainer.weights()
    return found


def ours(run: Run, stages: tuple[int, ...], zero: dict[str, Any]) -> dict[int, dict[str, Weights]]:
    found = {}
    for stage in stages:
        trainer = scripts.Ours(run, stage, **zero)
        found[stage] = results(trainer, scripts_of(run, stage))
        trainer.engine.destroy()
    return found


def plain(run: Run) -> dict[str, Weights]:
    return results(scripts.Plain(run), scripts_of(run, 0))


def check(run: Run, world_size: int, zero: dict[str, Any], bound: float, stages: tuple[int, ...] = STAGES) -> None:
    (expected,) = run_ranks(plain, 1, run)
    for of_rank in run_ranks(ours, world_size, run, stages, zero):
        for stage, found in of_rank.items():
            for name, weights in found.items():
                assert deviation(weights, expected[name]) <= bound, (name, stage)


@pytest.mark.parametrize(
    ("world_size", "stages"),
    [(1, (1,)), (2, (0, 3)), (3, (2,)), *(pytest.param(n, STAGES, marks=SOAK) for n in (1, 2, 3))],
)
@pytest.mark.parametrize("accumulation", (1, 2))
def test_scripts_that_touch_gradients_follow_plain_torch(
    world_size: int, stages: tuple[int, ...], accumulation: int
) -> None:
    check(Run(accumulation=accumulation), world_size, {}, 1e-12, stages)


def test_in_bf16_they_follow_one_process_with_float32_masters() -> None:
    check(Run(dtype="bf16"), 1, {}, 1e-7, stages=(0, 3))


@pytest.mark.parametrize(
    ("world_size", "stages"),
    [(3, (0, 3)), (2, (1, 2)), *(pytest.param(n, STAGES, marks=SOAK) for n in (2, 3))],
)
def test_in_bf16_all_stages_have_the_same_bits(world_size: int, stages: tuple[int, ...]) -> None:
    for found in run_ranks(ours, world_size, Run(dtype="bf16"), stages, {}):
        for stage in stages[1:]:
            for name, weights in found[stage].items():
                assert bits(weights) == bits(found[stages[0]][name]), (name, stage)


@pytest.mark.parametrize("tier", ("host", "nvme"))
@pytest.mark.parametrize("world_size", (pytest.param(1, marks=SOAK), 2, pytest.param(3, marks=SOAK)))
@pytest.mark.parametrize("accumulation", (pytest.param(1, marks=SOAK), 2))
def test_so_they_do_with_gradients_on_a_tier(tier: str, world_size: int, accumulation: int, tmp_path: Path) -> None:
    offload: dict[str, Any] = {"device": "cpu"} if tier == "host" else {"device": "nvme", "nvme_path": str(tmp_path)}
    check(Run(accumulation=accumulation), world_size, {"offload_optimizer": offload}, 1e-12, stages=(1, 2, 3))


# -- what is refused -------------------------------------------------------------------------------------------------


def refusal(engine: Any, act: Any) -> tuple[str, bool]:
    """What the next step raises on this rank after ``act``, and whether the weights are those before."""
    before = {unit.name: unit.master.clone() for unit in engine.partition.units}
    engine.backward(sum(engine(*zoo.batch(0, 0, dist.get_rank(), dist.get_world_size()))))
    try:
        act(engine)
        engine.step()
    except PartitionError as error:
        return str(error), deviation({unit.name: unit.master for unit in engine.partition.units}, before) == 0.0
    return "", False


def writes_on_one_rank(engine: Any) -> None:
    if dist.get_rank() == 1:
        engine.module.blocks[1].up.weight.grad = torch.ones_like(engine.module.blocks[1].up.weight)


def edits_on_one_rank(engine: Any) -> None:
    if dist.get_rank() == 1 and engine.zero_optimization_stage() == 0:
        engine.module.blocks[1].up.weight.grad.mul_(0.5)


def discards_on_one_rank(engine: Any) -> None:
    if dist.get_rank() == 1:
        engine.optimizer.zero_grad()


def discards_different_parts(engine: Any) -> None:
    engine.module.blocks[dist.get_rank()].zero_grad()


def refusals(stage: int) -> dict[str, tuple[str, bool]]:
    found = {}
    acts = [writes_on_one_rank, discards_on_one_rank, discards_different_parts, *[edits_on_one_rank][stage:]]
    for act in acts:
        engine = training.start(Run(), stage)
        found[act.__name__] = refusal(engine, act)
        engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_what_only_some_ranks_do_is_refused_on_every_rank_before_any_weight_changes(stage: int) -> None:
    for found in run_ranks(refusals, 2, stage):
        for name, (text, unchanged) in found.items():
            assert unchanged, (name, text)
        assert "'blocks.1.up.weight' was written on rank 1" in found["writes_on_one_rank"][0]
        assert "rank 1 discarded" in found["discards_on_one_rank"][0]
        assert "zero_grad" in found["discards_different_parts"][0]
        if stage == 0:
            assert "changed in place on rank 1 and not on rank 0" in found["edits_on_one_rank"][0]


def edits_by_rank() -> float:
    """The deviation of a step with gradients that each rank multiplied in place by another factor."""
    engine = training.start(Run(), 0)
    engine.backward(sum(engine(*zoo.batch(0, 0, dist.get_rank(), dist.get_world_size()))))
    average = {name: p.grad.clone() for name, p in engine.module.named_parameters()}
    for p in engine.module.parameters():
        p.grad.mul_(1 + dist.get_rank())
    found = [float((engine.full_grad(p) - 2 * average[n]).abs().max()) for n, p in engine.module.named_parameters()]
    engine.destroy(unshard=False)
    return max(found)


def test_in_place_changes_that_differ_between_ranks_are_averaged() -> None:
    assert max(run_ranks(edits_by_rank, 3)) <= 1e-14


def unscaled(stage: int) -> list[str]:
    """What writing a gradient under fp16's loss scale raises; what comes of one that was derived with it."""
    run = Run(dtype="fp32")
    fp16 = {"enabled": True, "initial_scale_power": 4}
    settings = {**training.config(run, stage, 1), "data_types": {}, "fp16": fp16}
    found = []
    for scaled in (False, True):
        model = zoo.build("plain", torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
        before = training.weights(engine)["norm.bias"]
        if scaled:
            engine.scale(sum(engine(*zoo.batch(0, 0))))
        engine.module.norm.bias.grad = torch.full_like(engine.module.norm.bias, 0.5 * engine.loss_scale())
        try:
            engine.step()
            found.append(f"{float((before - training.weights(engine)['norm.bias']).mean()):.3f}")
        except PartitionError as error:
            found.append(str(error))
        engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("stage", (1, 3))
def test_under_a_loss_scale_only_gradients_of_a_scaled_loss_are_taken(stage: int) -> None:
    ((refused, moved),) = run_ranks(unscaled, 1, stage)
    assert "'norm.bias'" in refused and "engine.scale(loss)" in refused
    assert moved == "0.500"


# -- two engines, copies ---------------------------------------------------------------------------------------------


def gan(stage: int | None) -> Weights:
    """The generator's loss goes through the discriminator, whose optimizer forgets what came of it."""
    pair = {}
    for number, name in enumerate(("d", "g")):
        torch.manual_seed(number)
        pair[name] = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)).double()
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-2) for name, model in pair.items()}
    engines = {
        name: model
        if stage is None
        else zero_core.initialize(
            model=model, optimizer=optimizers[name], config=training.config(Run(), stage, dist.get_world_size())
        )[0]
        for name, model in pair.items()
    }
    noise = torch.randn(6, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    rows = slice(None)
    if stage is not None:
        size = 6 // dist.get_world_size()
        rows = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)

    def train(name: str, loss: torch.Tensor) -> None:
        loss.backward()
        if stage is None:
            optimizers[name].step()
            optimizers[name].zero_grad()
        else:
            engines[name].step()

    for step in range(3):
        sample = noise.roll(step, 0)[rows]
        train("g", engines["d"](engines["g"](sample)).square().mean())
        optimizers["d"].zero_grad()
        fake = engines["g"](sample).detach()
        train("d", engines["d"](fake).square().mean() - engines["d"](sample).mean())
        optimizers["d"].zero_grad()
    if stage is None:
        return {f"{n}.{k}": p.detach().clone() for n, model in pair.items() for k, p in model.named_parameters()}
    found = {f"{n}.{k}": v for n, engine in engines.items() for k, v in training.weights(engine).items()}
    for engine in engines.values():
        engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_discriminators_optimizer_forgets_what_the_generators_loss_gave_it(stage: int) -> None:
    expected = gan(None)
    for found in run_ranks(gan, 2, stage):
        assert deviation(found, expected) <= 1e-12


def copies(stage: int) -> list[Any]:
    engine = training.start(Run(), stage)
    model, optimizer = engine.module, engine.optimizer
    with engine.gathered(model.parameters()):
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model.blocks[0])]
    pickle.loads(pickle.dumps(optimizer)).zero_grad()
    engine.backward(sum(engine(*zoo.batch(0, 0))))
    for twin in twins:
        for p in twin.parameters():
            p.grad = torch.ones_like(p)
        twin.zero_grad()
    kept = engine.full_grad(model.norm.bias) is not None
    cleared = all(p.grad is None for twin in twins for p in twin.parameters())
    engine.destroy()
    plain = [object.__dict__.get("zero_grad") for object in (model, model.blocks[0], optimizer)]
    return [kept, cleared, plain]


@pytest.mark.parametrize("stage", (0, 3))
def test_copies_of_the_model_zero_their_own_gradients_and_destroy_leaves_nothing_behind(stage: int) -> None:
    assert run_ranks(copies, 1, stage) == [[True, True, [None, None, None]]]
