"""A failure in forward or backward that the user's loop catches: training continues as plain torch's, or says why
not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from torch import nn
from torch.utils.hooks import RemovableHandle
from training import Run

from zero_comm import run_ranks

STAGES = (0, 1, 2, 3)


class Scene(NamedTuple):
    """Training of ``steps`` micro-batches in which those of ``fails`` (micro-batch -> where) fail on every rank."""

    fails: dict[int, str]
    variant: str = "plain"
    accumulation: int = 1
    steps: int = 6
    kind: type[BaseException] = ArithmeticError


SCENES = {
    "wrong shape in forward": Scene({2: "shape"}),
    "in the middle of forward": Scene({2: "forward"}),
    "in the first forward": Scene({0: "forward"}),
    "in the middle of backward": Scene({3: "backward"}),
    "in the first, learning backward": Scene({0: "backward", 1: "backward"}),
    "at the last gradient of backward": Scene({3: "last gradient"}),
    "again and again": Scene({0: "shape", 1: "backward", 3: "forward", 4: "last gradient"}),
    "forward inside an accumulation": Scene({1: "forward", 4: "shape"}, accumulation=2, steps=8),
    "backward inside an accumulation": Scene({1: "backward", 4: "last gradient"}, accumulation=2, steps=9),
    "recomputed activations": Scene({1: "recomputation", 2: "backward", 3: "forward"}, "recomputed"),
    "recomputed activations, reentrant": Scene(
        {1: "recomputation", 2: "backward", 3: "forward"}, "recomputed reentrant"
    ),
    "units used out of order": Scene({2: "backward", 4: "forward"}, "reused + functional use"),
}


OFTEN = ["wrong shape in forward", "again and again", "backward inside an accumulation"]


class Saboteur:
    """Raises once inside a model's forward or backward."""

    def __init__(self, model: nn.Module, kind: type[BaseException]) -> None:
        self._model, self._kind = model, kind
        self._handles: list[RemovableHandle] = []
        self._calls = 0

    def _raise(self, *_: Any) -> None:
        raise self._kind("no luck")

    def _in_backward(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._raise)

    def _second_call(self, *_: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            self._raise()

    def prepare(self, where: str | None) -> None:
        self._calls = 0
        block, first = self._model.blocks[1], self._model.embedding
        if where == "forward":
            self._handles.append(block.register_forward_pre_hook(self._raise))
        elif where == "backward":
            self._handles.append(block.register_forward_hook(self._in_backward))
        elif where == "recomputation":
            self._handles.append(block.register_forward_pre_hook(self._second_call))
        elif where == "last gradient":
            self._handles.append(first.register_forward_hook(self._in_backward))

    def withdraw(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def inputs(scene: Scene, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a micro-batch, which does not fit the model where the scene says so."""
    if scene.fails.get(number) == "shape":
        return torch.zeros(2, 3), torch.zeros(7)
    return zoo.batch(number, 0, dist.get_rank(), dist.get_world_size())


def plain(scene: Scene) -> dict[str, torch.Tensor]:
    """The skipping loop by torch: an accumulation begins again when its backward failed."""
    model = zoo.build(scene.variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)
    done = 0
    for number in range(scene.steps):
        where = scene.fails.get(number)
        if where in ("shape", "forward"):
            continue
        if where is not None:
            optimizer.zero_grad()
            done = 0
            continue
        (sum(model(*zoo.batch(number, 0))) / scene.accumulation).backward()
        done += 1
        if done == scene.accumulation:
            optimizer.step()
            optimizer.zero_grad()
            done = 0
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def skipping(scene: Scene, stage: int, zero: dict[str, Any], dtype: str = "fp64") -> dict[str, torch.Tensor]:
    """The same loop with the engine."""
    engine = training.start(Run(scene.variant, accumulation=scene.accumulation, dtype=dtype), stage, **zero)
    saboteur = Saboteur(engine.module, scene.kind)
    caught = 0
    for number in range(scene.steps):
        saboteur.prepare(scene.fails.get(number))
        try:
            engine.backward(sum(engine(*inputs(scene, number))))
        except BaseException as error:
            if scene.fails.get(number) == "shape" or "no luck" in str(error):
                caught += 1
            if scene.fails.get(number) not in ("shape", "forward"):
                engine.zero_grad()
            continue
        finally:
            saboteur.withdraw()
        engine.step()
    assert caught == len(scene.fails), (scene, stage, caught)
    result = training.weights(engine)
    engine.destroy()
    return result


def undisturbed(scene: Scene, stage: int, zero: dict[str, Any], dtype: str) -> dict[str, torch.Tensor]:
    """The engine's weights after the micro-batches that count, none of which fails."""
    engine = training.start(Run(scene.variant, accumulation=scene.accumulation, dtype=dtype), stage, **zero)
    taken: list[int] = []
    for number in range(scene.steps):
        where = scene.fails.get(number)
        if where is None:
            taken.append(number)
        elif where not in ("shape", "forward"):
            del taken[len(taken) - len(taken) % scene.accumulation :]  # its accumulation begins again
    for number in taken:
        engine.backward(sum(engine(*inputs(scene, number))))
        engine.step()
    found = training.weights(engine)
    engine.destroy(unshard=False)
    return found


def all_scenes(
    names: list[str], stages: tuple[int, ...], tier: str, folder: str, dtype: str
) -> dict[tuple[str, int], float]:
    """How far each scene's weights are from plain torch's, on this rank; in 16 bits, from those of the engine without
    failures."""
    torch.set_num_threads(1)
    found = {}
    for name, stage in itertools.product(names, stages):
        zero = training.offload(stage, tier, folder)
        skipped = skipping(SCENES[name], stage, zero, dtype)
        expected = plain(SCENES[name]) if dtype == "fp64" else undisturbed(SCENES[name], stage, zero, dtype)
        found[name, stage] = training.deviation(skipped, expected)
    return found


def check(world_size: int, names: list[str], stages: tuple[int, ...], tier: str, folder: Path, dtype: str) -> None:
    for found in run_ranks(all_scenes, world_size, names, stages, tier, str(folder), dtype, timeout=300):
        assert all(deviation <= (1e-12 if dtype == "fp64" else 0.0) for deviation in found.values()), found


@pytest.mark.parametrize(
    ("world_size", "stages", "tier", "dtype", "names"),
    [
        (1, (1, 3), "device", "fp64", OFTEN),
        (2, (0, 2, 3), "device", "fp64", OFTEN),
        (3, (1, 3), "device", "fp64", OFTEN),
        (2, (3,), "nvme", "bf16", OFTEN[1:]),
        (3, (1, 2), "cpu", "bf16", OFTEN[1:]),
        (1, (3,), "cpu", "fp64", OFTEN[1:2]),
    ],
)
def test_a_loop_that_skips_batches_that_fail_on_all_ranks_trains_as_plain_torch(
    world_size: int, stages: tuple[int, ...], tier: str, dtype: str, names: list[str], tmp_path: Path
) -> None:
    check(world_size, names, stages, tier, tmp_path, dtype)


PLACES = [(0, "device"), *((stage, tier) for stage in (1, 2, 3) for tier in ("device", "cpu", "nvme"))]


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ("fp64", "bf16"))
@pytest.mark.parametrize(("stage", "tier"), PLACES)
@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_every_failure_that_all_ranks_share_is_skipped_as_by_plain_torch(
    world_size: int, stage: int, tier: str, dtype: str, tmp_path: Path
) -> None:
    check(world_size, list(SCENES), (stage,), tier, tmp_path, dtype)


def interrupted(stage: int) -> float:
    scene = Scene({1: "forward", 3: "backward"}, kind=KeyboardInterrupt)
    return training.deviation(skipping(scene, stage, {}), plain(scene))


def test_a_notebook_s_interrupt_ends_the_pass_and_not_the_engine() -> None:
    assert all(run_ranks(interrupted, 1, stage)[0] <= 1e-12 for stage in (0, 3))


def retried_by_one(stage: int, names: list[str]) -> dict[str, torch.Tensor]:
    """The last rank alone fails in forward, and tries the same batch again."""
    engine = training.start(Run(), stage)
    saboteur = Saboteur(engine.module, MemoryError)
    for number in range(4):
        if dist.get_rank() == dist.get_world_size() - 1 and number in (0, 2):
            for where in names:
                saboteur.prepare(where)
                outcome(lambda: engine(*zoo.batch(number, 0)))  # noqa: B023
                saboteur.withdraw()
        training.train(engine, Run(), number, number + 1)
    return training.weights(engine)


@pytest.mark.parametrize("stage", (0, 2))
def test_one_rank_may_fail_in_forward_and_try_again_below_stage_3(stage: int) -> None:
    expected = training.plain(Run(steps=4))
    for found in run_ranks(retried_by_one, 2, stage, ["forward", "forward"], timeout=60):
        assert training.deviation(found, expected) <= 1e-12


def outcome(scenario: Callable[[], Any]) -> str:
    try:
        scenario()
    except Exception as error:
        return f"{type(error).__name__}: {error}{getattr(error, '__notes__', '')}"
    return "no error"


def careless(stage: int) -> tuple[str, str, str, bool]:
    """A loop that does not call zero_grad after a failed backward."""
    engine = training.start(Run(), stage)
    saboteur = Saboteur(engine.module, ArithmeticError)
    losses = engine(*zoo.batch(0, 0, dist.get_rank(), dist.get_world_size()))
    engine.backward(losses[0])
    engine.step()
    before = training.weights(engine)
    saboteur.prepare("backward")
    losses = engine(*zoo.batch(1, 0, dist.get_rank(), dist.get_world_size()))
    first = outcome(lambda: engine.backward(losses[0]))
    saboteur.withdraw()
    again = engine(*zoo.batch(1, 0, dist.get_rank(), dist.get_world_size()))
    second, third = outcome(lambda: engine.backward(again[0])), outcome(engine.step)
    same = training.deviation(training.weights(engine), before) == 0.0
    engine.zero_grad()
    training.train(engine, Run(), 2, 3)
    return first, second, third, same and engine.was_step_applied()


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_a_torn_gradient_is_refused_until_zero_grad(world_size: int, stage: int) -> None:
    for first, second, third, unharmed in run_ranks(careless, world_size, stage, timeout=60):
        assert first.startswith("ArithmeticError: no luck") and "engine.zero_grad()" in first, first
        for message in (second, third):
            assert message.startswith("PartitionError") and "engine.zero_grad()" in message, message
        assert unharmed


def inside_an_accumulation(stage: int, folder: str, dtype: str, zero: dict[str, Any]) -> tuple[list[str], float, float]:
    """Save and load between the micro-batches of an accumulation of 2; in 16 bits a run without them is expected."""
    run = Run(accumulation=2, dtype=dtype)
    if dtype == "fp64":
        expected = training.plain(run._replace(steps=4))
    else:
        undisturbed = training.start(run, stage, **zero)
        training.train(undisturbed, run, 0, 4)
        expected = training.weights(undisturbed)
        undisturbed.destroy(unshard=False)
    engine = training.start(run, stage, **zero)
    training.train(engine, run, 0, 2)
    engine.save_checkpoint(folder)
    losses = engine(*zoo.batch(2, 0, dist.get_rank(), dist.get_world_size()))
    engine.backward(losses[0])
    refused = [outcome(lambda: engine.save_checkpoint(folder, "before the step"))]
    engine.step()
    refused.append(outcome(lambda: engine.save_checkpoint(folder, "inside")))
    engine.load_checkpoint(folder)
    training.train(engine, run, 2, 4)
    loaded = training.weights(engine)
    return refused, training.deviation(loaded, expected), float(engine.global_steps)


@pytest.mark.parametrize(
    ("world_size", "stage", "tier", "dtype"),
    [
        (1, 0, "device", "fp64"),
        (2, 1, "cpu", "bf16"),
        (3, 3, "device", "fp64"),
        (2, 2, "nvme", "fp64"),
        *(pytest.param(n, *p, d, marks=pytest.mark.soak) for n in (1, 2, 3) for p in PLACES for d in ("fp64", "bf16")),
    ],
)
def test_a_checkpoint_knows_no_half_accumulation(
    world_size: int, stage: int, tier: str, dtype: str, tmp_path: Path
) -> None:
    zero = training.offload(stage, tier, str(tmp_path))
    found = run_ranks(inside_an_accumulation, world_size, stage, str(tmp_path / "saved"), dtype, zero, timeout=90)
    for refused, deviation, steps in found:
        for message in refused:
            assert message.startswith("UsageError") and "1 of 2 micro-batches" in message, message
        assert deviation <= (1e-12 if dtype == "fp64" else 0.0) and steps == 4
