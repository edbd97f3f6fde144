"""Gradients that the engine holds or takes: the user's hooks act on them, and clipping acts or is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from torch import nn
from training import Run, deviation

import zero_core
from zero_comm import run_ranks
from zero_partition import PartitionError

STAGES = (0, 1, 2, 3)
SOAK = pytest.mark.soak
Weights = dict[str, torch.Tensor]
Hook = Callable[[torch.Tensor], None]


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def mask(parameter: torch.Tensor) -> None:
    parameter.grad = parameter.grad * (torch.arange(parameter.numel()).view(parameter.shape) % 2)


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def chosen(model: Any) -> list[nn.Parameter]:
    """Among the first and the last whose gradients come, one that is used twice, and all of a small unit."""
    return [model.embedding.weight, model.blocks[1].up.weight, *model.norm.parameters()]


def add_hooks(model: Any, kinds: tuple[Hook, ...]) -> list[Any]:
    return [p.register_post_accumulate_grad_hook(hook) for p in chosen(model) for hook in kinds]


def scripted(model: Any, backward: Callable[[int], None], step: Callable[[], None], *, early: bool) -> None:
    """Hooks before the engine's (``early``), after it, in the middle of a run; some are removed."""
    first = [] if early else add_hooks(model, (halve,))
    for number in range(4):
        if number == 1:
            second = add_hooks(model, (mask, halve))
        if number == 2:
            for handle in [*first, *second[::2]]:
                handle.remove()
            model.blocks[2].down.bias.register_post_accumulate_grad_hook(drop)
        backward(number)
        step()


def hooked_plain(early: bool) -> Weights:
    model = zoo.build("plain")
    if early:
        add_hooks(model, (halve,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    scripted(model, lambda number: sum(model(*zoo.batch(number, 0))).backward(), step, early=early)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


WAYS = [(stage, early, own_call) for stage in STAGES for early in (False, True) for own_call in (False, True)]
"""Stage, whether hooks came before the engine's, whether backward is the engine's."""


def hooked(ways: Sequence[tuple[int, bool, bool]], tier: dict[str, Any]) -> dict[tuple[int, bool, bool], Weights]:
    found = {}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for stage, early, own_call in ways:
        model = zoo.build("plain")
        if early:
            add_hooks(model, (halve,))
        engine = training.start(Run(), stage, model, **(tier if stage else {}))

        def backward(number: int, engine: Any = engine, own_call: bool = own_call) -> None:
            loss = sum(engine(*zoo.batch(number, 0, rank, world_size)))
            engine.backward(loss) if own_call else loss.backward()

        scripted(model, backward, engine.step, early=early)
        found[stage, early, own_call] = training.weights(engine)
        engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize(
    ("world_size", "ways", "tier"),
    [
        (1, WAYS[5::9], "none"),
        (2, WAYS[::3], "none"),
        (3, WAYS[7::8], "cpu"),
        *(pytest.param(n, WAYS, tier, marks=SOAK) for n in (1, 2, 3) for tier in ("none", "cpu")),
    ],
)
def test_hooks_act_on_gradients_as_in_plain_torch_whenever_they_were_registered(
    world_size: int, ways: Sequence[tuple[int, bool, bool]], tier: str
) -> None:
    expected = {early: hooked_plain(early) for early in (False, True)}
    offload = {} if tier == "none" else {"offload_optimizer": {"device": tier}}
    for found in run_ranks(hooked, world_size, ways, offload):
        for (stage, early, own_call), weights in found.items():
            assert deviation(weights, expected[early]) <= 1e-12, (stage, early, own_call)


def in_an_accumulation(stage: int) -> tuple[str, float]:
    """What the second backward says to a hook that changes the gradient; the deviation with one that only looks."""
    run = Run(accumulation=2)
    engine = training.start(run, stage)
    seen: list[float] = []
    engine.module.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    training.train(engine, run, 0, 2)
    found = training.deviation(training.weights(engine), training.plain(run._replace(steps=2)))
    engine.module.norm.weight.register_post_accumulate_grad_hook(halve)
    try:
        training.train(engine, run, 2, 3)
        refusal = ""
    except PartitionError as error:
        refusal = str(error)
    engine.zero_grad()
    return refusal, found if len(seen) == 6 else float("inf")


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 1), (2, 3), pytest.param(3, 2, marks=SOAK)])
def test_a_hook_that_changes_a_part_of_an_accumulation_is_refused_by_name(world_size: int, stage: int) -> None:
    for refusal, found in run_ranks(in_an_accumulation, world_size, stage):
        assert "'norm.weight'" in refusal and "register_hook" in refusal, refusal
        assert found <= 1e-12


# -- clipping by torch ------------------------------------------------------------------------------------------------


def clipped(scenes: Sequence[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """What torch's clipping says after an evaluation, after a forward that trains, and in an accumulation."""
    found = {}
    for stage, between in scenes:
        run = Run(accumulation=2 if between == "accumulation" else 1)
        engine = training.start(run, stage)
        batch = zoo.batch(0, 0, dist.get_rank(), dist.get_world_size())
        engine.backward(sum(engine(*batch)))
        if between == "evaluation":
            with torch.no_grad():
                engine(*batch)
        if between == "forward":
            engine(*batch)
        try:
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
            engine.step()
            text = "clipped" if abs(float(engine.get_global_grad_norm()) - 1e-3) < 1e-6 else "silent"
        except PartitionError as error:
            text = str(error)
        engine.destroy(unshard=False)
        found[stage, between] = text
    return found


SCENES = [(s, between) for s in STAGES for between in ("nothing", "evaluation", "forward", "accumulation")]


@pytest.mark.parametrize(
    ("world_size", "scenes"),
    [
        (2, [*SCENES[:4], SCENES[5], SCENES[10], *SCENES[12:]]),
        *(pytest.param(n, SCENES, marks=SOAK) for n in (1, 2, 3)),
    ],
)
def test_torchs_clipping_acts_or_is_refused_whatever_comes_between_backward_and_it(
    world_size: int, scenes: Sequence[tuple[int, str]]
) -> None:
    for found in run_ranks(clipped, world_size, scenes):
        for (stage, between), text in found.items():
            refused = "parameter '" in text and "engine.clip_grad_norm_" in text
            acts = stage == 0 and between in ("nothing", "evaluation")
            assert text == "clipped" if acts else refused, (stage, between, text)


def cancelled(stage: int) -> bool:
    """Return whether ``p.grad = None`` after an evaluation forgets the gradient."""
    engine = training.start(Run(), stage)
    batch = zoo.batch(0, 0, dist.get_rank(), dist.get_world_size())
    engine.backward(sum(engine(*batch)))
    with torch.no_grad():
        engine(*batch)
    engine.module.norm.bias.grad = None
    gone = engine.full_grad(engine.module.norm.bias)
    kept = engine.full_grad(engine.module.norm.weight)
    engine.destroy(unshard=False)
    return gone is None or not bool(gone.any()) if kept is not None else False


@pytest.mark.parametrize("stage", (1, 3))
def test_a_gradient_is_cancelled_after_an_evaluation_too(stage: int) -> None:
    assert all(run_ranks(cancelled, 2, stage))


def halve_all(engine: Any, wrapper: nn.Module, other: torch.optim.Optimizer) -> None:
    for p in engine.module.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def zero_around(engine: Any, wrapper: nn.Module, other: torch.optim.Optimizer) -> None:
    wrapper.zero_grad()


def zero_by_another(engine: Any, wrapper: nn.Module, other: torch.optim.Optimizer) -> None:
    other.zero_grad()


def step_by_another(engine: Any, wrapper: nn.Module, other: torch.optim.Optimizer) -> None:
    other.step()


BY_HAND = (halve_all, zero_around, zero_by_another, step_by_another)


def read_by_hand(stage: int, accumulation: int) -> tuple[list[str], str]:
    """What code hears that reads ``p.grad`` by itself; what torch's clipping of a parameter in no group does."""
    heard = []
    engine = training.start(Run(accumulation=accumulation), stage)
    wrapper = nn.Sequential(engine.module)
    other = torch.optim.SGD(list(engine.module.parameters()), lr=0.1)
    engine.backward(sum(engine(*zoo.batch(0, 0, dist.get_rank(), dist.get_world_size()))))
    engine.module.zero_grad(set_to_none=False)
    before = training.weights(engine)
    for act in BY_HAND:
        try:
            act(engine, wrapper, other)
            heard.append("nothing")
        except PartitionError as refusal:
            heard.append(str(refusal))
        if heard[-1] != "nothing" and deviation(training.weights(engine), before):
            heard[-1] += " but weights changed"
    engine.destroy(unshard=False)
    model = zoo.build("plain")
    chosen = [p for n, p in model.named_parameters() if n != "norm.bias"]
    optimizer = torch.optim.SGD(chosen, lr=0.1)
    config = training.config(Run(), stage, dist.get_world_size())
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(sum(engine(*zoo.batch(0, 0, dist.get_rank(), dist.get_world_size()))))
    try:
        torch.nn.utils.clip_grad_norm_([model.norm.bias], 1e-3)
        refusal = ""
    except PartitionError as error:
        refusal = str(error)
    engine.destroy(unshard=False)
    return heard, refusal


@pytest.mark.parametrize(
    ("world_size", "stage", "accumulation"),
    [
        (2, 0, 1),
        (1, 1, 1),
        (2, 3, 1),
        *(pytest.param(n, s, a, marks=SOAK) for n in (1, 2, 3) for s in STAGES for a in (1, 2)),
    ],
)
def test_code_that_would_go_on_without_gradients_is_refused_by_name(
    world_size: int, stage: int, accumulation: int
) -> None:
    for heard, refusal in run_ranks(read_by_hand, world_size, stage, accumulation, timeout=120):
        assert world_size == 1 or ("'norm.bias'" in refusal and "in no param group" in refusal)
        for act, text in zip(BY_HAND, heard, strict=True):
            refused = "p.grad of parameter '" in text and "engine.full_grad" in text and "but weights" not in text
            assert text == "nothing" if stage == 0 and accumulation == 1 else refused, (act.__name__, text)


# -- parameters that forward casts ------------------------------------------------------------------------------------


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.router = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router.float()
        return self.router(self.enter(x).float()).square().mean()


def cast_edits() -> dict[str, float]:
    """How far an in-place change of a cast parameter's ``.grad`` moves its weight beyond what the change left."""
    found = {}
    for kind in ("zero", "one element"):
        model = Cast()
        settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "steps_per_print": None}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
        weight = engine.module.router.weight
        before = engine.full_param(weight)
        engine.backward(engine(torch.full((2, 4), 1.0 + dist.get_rank(), dtype=torch.bfloat16)))
        assert weight.grad.dtype is torch.float32
        if kind == "zero":
            weight.grad.zero_()
        else:
            weight.grad[0, 0] = 0.5
        expected = before - weight.grad
        engine.step()
        found[kind] = float((engine.full_param(weight) - expected).abs().max())
        engine.destroy()
    return found


def test_in_place_changes_count_where_forward_has_cast_the_parameter() -> None:
    for found in run_ranks(cast_edits, 2):
        assert all(apart <= 1e-6 for apart in found.values()), found
