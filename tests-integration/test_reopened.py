"""After one rank alone has failed, and the scripts have caught it: saving, reading and training continue as before
it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import Run

import zero_core
from zero_ckpt import open_checkpoint
from zero_comm import run_ranks

WHERE = ("forward", "backward", "first gradient")  # below stage 3 nobody waits in forward, and no failure is shared
PLACES = [(0, "device"), *((stage, tier) for stage in (1, 2, 3) for tier in ("device", "cpu", "nvme"))]
SOAK = pytest.mark.soak


def fail(*_: Any) -> None:
    raise ArithmeticError("no luck")


def fail_in_backward(_module: Any, _args: Any, output: torch.Tensor) -> None:
    if output.requires_grad:  # else a forward whose activations are computed again in backward
        output.register_hook(fail)


def fails_in(engine: Any, where: str, number: int) -> str:
    """One step of a loop that catches what is raised; on the last rank it fails in the middle."""
    block, handle = engine.module.blocks[1], None
    if dist.get_rank() == dist.get_world_size() - 1:
        if where == "forward":
            handle = block.register_forward_pre_hook(fail)
        elif where == "backward":
            handle = block.register_forward_hook(fail_in_backward)
        else:
            both = (*block.parameters(), *engine.module.blocks[2].parameters())
            handle = next(p for p in both if p.requires_grad).register_hook(fail)
    try:
        engine.backward(sum(engine(*batch(number))))
        engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if handle is not None:
            handle.remove()
    return "no error"


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return zoo.batch(number, 0, dist.get_rank(), dist.get_world_size())


def saved(folder: str) -> dict[tuple[str, str], bytes]:
    """Every tensor of a checkpoint, by name and kind."""
    checkpoint = open_checkpoint(folder)
    return {
        (entry.name, entry.kind): bytes(checkpoint.read(entry.name, entry.kind))
        for entry in checkpoint.manifest.tensors
    }


def counted(engine: Any) -> tuple[int, int, int]:
    return engine.global_steps, engine.micro_steps, engine.global_samples


def goes_on(stage: int, tier: str, dtype: str, where: str, folder: str) -> dict[str, Any]:
    """Three steps, a failure of one rank, a save, a read, and three more steps."""
    run = Run(dtype=dtype)
    engine = training.start(run, stage, **training.offload(stage, tier, folder))
    training.train(engine, run, 0, 3)
    engine.save_checkpoint(f"{folder}/before", "saved")
    weights, counters = training.bits(training.weights(engine)), counted(engine)
    said = fails_in(engine, where, 3)
    told = outcome(lambda: engine.backward(sum(engine(*batch(3)))))
    engine.save_checkpoint(f"{folder}/after", "saved")
    facts = {
        "said": said,
        "told": told,
        "saved alike": saved(f"{folder}/before/saved") == saved(f"{folder}/after/saved"),
        "read alike": training.bits(training.weights(engine)) == weights,
        "counted alike": counted(engine) == counters,
        "refused": outcome(lambda: engine.backward(sum(engine(*batch(3))))),
    }
    engine.zero_grad()
    training.train(engine, run, 3, 6)
    facts["weights"] = training.weights(engine)
    engine.destroy(unshard=False)
    return facts


def undisturbed(stage: int, tier: str, dtype: str, folder: str) -> dict[str, torch.Tensor]:
    run = Run(dtype=dtype, steps=6)
    if dtype == "fp64":
        return training.plain(run)
    return training.ranks(run, stage, training.offload(stage, tier, folder))


def outcome(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def all_cases(places: list[tuple[int, str]], dtype: str, wheres: tuple[str, ...], folder: str) -> dict[Any, Any]:
    """The facts of `goes_on`, and the weights of a run without failure, by place."""
    found = {}
    for (stage, tier), where in itertools.product(places, wheres):
        if stage < 3 and where == "forward":
            continue
        own = Path(folder, f"{stage} {tier} {where}")
        own.mkdir(exist_ok=True)
        facts = goes_on(stage, tier, dtype, where, str(own))
        found[stage, tier, where] = facts, undisturbed(stage, tier, dtype, str(own))
    return found


@pytest.mark.parametrize(
    ("world_size", "places", "dtype", "wheres"),
    [
        (2, [(3, "device"), (0, "device")], "fp64", WHERE[1:2]),
        (3, [(3, "nvme")], "fp64", WHERE[:1]),
        (2, [(1, "cpu"), (2, "nvme")], "bf16", WHERE[2:]),
        *(pytest.param(n, [p], d, WHERE, marks=SOAK) for n in (2, 3) for p in PLACES for d in ("fp64", "bf16")),
    ],
)
def test_a_save_a_read_and_training_go_on_after_a_failure_of_one_rank(
    world_size: int, places: list[tuple[int, str]], dtype: str, wheres: tuple[str, ...], tmp_path: Path
) -> None:
    found = run_ranks(all_cases, world_size, places, dtype, wheres, str(tmp_path))
    for rank, by_case in enumerate(found):
        for (stage, tier, where), (facts, expected) in by_case.items():
            case = (rank, stage, tier, where)
            if rank == world_size - 1:
                assert facts["said"].startswith("ArithmeticError: no luck"), case
            assert "engine.save_checkpoint" in facts["told"] and "engine.zero_grad()" in facts["told"], (case, facts)
            assert facts["refused"].startswith("PartitionError") and "engine.zero_grad()" in facts["refused"], facts
            assert facts["saved alike"] and facts["read alike"] and facts["counted alike"], (case, facts)
            if rank == 0 or dtype == "fp64":
                deviation = training.deviation(facts["weights"], expected)
                assert deviation <= (1e-12 if dtype == "fp64" else 0.0), (case, deviation)


def read_all(engine: Any, _folder: str) -> Any:
    with engine.gathered(list(engine.module.parameters())):
        return [p.sum() for p in engine.module.parameters()]


FIRST_CALLS: dict[str, Callable[[Any, str], Any]] = {
    "zero_grad of the engine": lambda engine, _: engine.zero_grad(),
    "zero_grad of the optimizer": lambda engine, _: engine.optimizer.zero_grad(),
    "zero_grad of the model": lambda engine, _: engine.module.zero_grad(),
    "gathered": read_all,
    "consolidated": lambda engine, _: engine.consolidated_state_dict(),
    "full_state": lambda engine, _: engine.full_state(engine.module.norm.weight, "exp_avg"),
    "full_grad": lambda engine, _: engine.full_grad(engine.module.norm.weight),
    "load": lambda engine, folder: engine.load_checkpoint(folder),
}


class Schedule:
    """Fails once when it is saved, on the last rank."""

    def __init__(self) -> None:
        self.fails = dist.get_rank() == dist.get_world_size() - 1

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            self.fails = False
            fail()
        return {}

    def load_state_dict(self, _state: Any) -> None:
        """Nothing is kept."""

    def step(self) -> None:
        """A rate that stays."""


def fails_elsewhere(engine: Any, where: str, folder: str) -> str:
    if where == "save":
        engine.lr_scheduler = Schedule()
        return outcome(lambda: engine.save_checkpoint(folder, "failing"))
    with engine.gathered(list(engine.module.parameters())):
        said = outcome(lambda: fail() if dist.get_rank() == dist.get_world_size() - 1 else None)
    return said


VARIANTS = ("plain", "recomputed", "recomputed reentrant", "reused + functional use", "unused", "frozen")


def again_and_again(stage: int, variant: str, accumulation: int, names: list[str], folder: str) -> dict[str, Any]:
    """By first call after a failure, how far the weights are from plain torch's; each fails somewhere else."""
    run = Run(variant, accumulation=accumulation)
    engine = training.start(run, stage)
    training.train(engine, run, 0, 1)
    found: dict[str, Any] = {}
    step = 1
    for number, name in enumerate(names):
        if name == "load":
            engine.save_checkpoint(folder)
        for _ in range(number % accumulation):  # a part of an accumulation before the failure
            engine.backward(sum(engine(*batch(7))))
            engine.step()
        kinds = WHERE if stage == 3 else WHERE[1:]
        where = ((*kinds, "save") if accumulation == 1 else kinds)[number % (len(kinds) + (accumulation == 1))]
        said = fails_elsewhere(engine, where, f"{folder}/other") if where == "save" else fails_in(engine, where, step)
        found[f"{name}: failed"] = said != "no error"
        found[name] = outcome(lambda: FIRST_CALLS[name](engine, folder))  # noqa: B023
        engine.zero_grad()
        training.train(engine, run, step, step + 1)
        step += 1
    found["deviation"] = training.deviation(training.weights(engine), training.plain(run._replace(steps=step)))
    engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize(
    ("world_size", "stage", "variant", "accumulation", "names"),
    [
        (2, 3, "plain", 1, ["load", "zero_grad of the optimizer"]),
        (3, 2, "plain", 2, ["gathered"]),
        (2, 1, "frozen", 1, ["zero_grad of the optimizer", "zero_grad of the model"]),
        *(pytest.param(n, s, v, 1, [*FIRST_CALLS], marks=SOAK) for n in (2, 3) for s in range(4) for v in VARIANTS),
        *(pytest.param(n, s, "plain", 3, [*FIRST_CALLS], marks=SOAK) for n in (2, 3) for s in (2, 3)),
    ],
)
def test_any_collective_call_may_be_the_first_after_a_failure(
    world_size: int, stage: int, variant: str, accumulation: int, names: list[str], tmp_path: Path
) -> None:
    for found in run_ranks(again_and_again, world_size, stage, variant, accumulation, names, str(tmp_path)):
        assert found.pop("deviation") <= 1e-12
        for name, said in found.items():
            assert said is True if name.endswith("failed") else said == "no error", (name, said)


def stays_away(stage: int) -> tuple[str, str, float]:
    """The last rank fails and comes to its save only when the others have given up."""
    engine = training.start(Run(), stage)
    engine.destroy()
    config = {**training.config(Run(), stage, dist.get_world_size()), "comm": {"stopped_after": 2.0}}
    engine = zero_core.initialize(model=engine.module, config=config)[0]
    fails_in(engine, "backward", 0)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == dist.get_world_size() - 1:
        store.wait(["given up"])
    began = time.monotonic()
    first = outcome(lambda: training.weights(engine))
    waited = time.monotonic() - began
    store.set("given up", "1")
    return first, outcome(engine.zero_grad), waited


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SOAK), 3])
def test_ranks_give_up_on_one_that_never_comes_and_so_does_that_one(stage: int) -> None:
    *others, (late, late_again, at_once) = run_ranks(stays_away, 3 if stage == 1 else 2, stage)
    absent = f"rank {len(others)} to make the same call after the failure"
    for first, again, _ in others:
        assert first.startswith("PeerError") and absent in first, first
        assert again.startswith("CommError") and absent in again and "load a checkpoint" in again, again
    assert absent in late and absent in late_again
    assert at_once < min(waited for *_, waited in others)  # it need not wait for what the others gave up


def torn(stage: int) -> tuple[str, str]:
    """The optimizer of the last rank fails inside its arithmetic."""
    engine = training.start(Run(), stage)
    training.train(engine, Run(), 0, 1)
    state = next(iter(engine.optimizer.state.values()))
    moments = state["exp_avg"]
    if dist.get_rank() == dist.get_world_size() - 1:
        state["exp_avg"] = moments.new_zeros(0)
    outcome(lambda: training.train(engine, Run(), 1, 3))
    state["exp_avg"] = moments
    return outcome(lambda: training.weights(engine)), outcome(engine.zero_grad)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SOAK), 1, pytest.param(2, marks=SOAK), 3])
def test_after_half_a_step_there_is_nothing_to_go_on_from(stage: int) -> None:
    for first, again in run_ranks(torn, 2, stage):
        assert first.startswith("CommError") and "failed while the step was writing" in first, first
        assert "load a checkpoint" in again, again
