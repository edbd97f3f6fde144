"""Caught failures in 16 bits, under audits, with quantized gradients or weights and with copies of the model leave no
trace."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import Run

import zero_core
from zero_ckpt import open_checkpoint
from zero_comm import run_ranks

SOAK = pytest.mark.soak
FAILING = 2
STEPS = 5
WHERE = ("forward", "backward", "step")


class Mode(NamedTuple):
    """The settings that a mode adds to a run in fp32 without quantization, and the stages that have it."""

    stages: tuple[int, ...]
    settings: Mapping[str, Any]
    zero: Mapping[str, Any]


SCALE = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
SKIPPING = {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}
BF16 = {"bf16": {"enabled": True}}
MODES = {
    "bf16": Mode((0, 1, 2, 3), BF16, {}),
    "fp16, a scale that grows": Mode((0, 1, 2, 3), {"fp16": SCALE}, {}),
    "fp16, a scale that overflows": Mode((0, 1, 2, 3), {"fp16": SKIPPING}, {}),
    "audited": Mode((0, 1, 2, 3), {"audit_every": 1}, {}),
    "qgZ": Mode((3,), {}, {"zero_quantized_gradients": True}),
    "qwZ": Mode((3,), {}, {"zero_quantized_weights": True}),
    "qwZ + qgZ, bf16": Mode((3,), BF16, {"zero_quantized_gradients": True, "zero_quantized_weights": True}),
    "MiCS of 1": Mode((3,), {}, {"mics_shard_size": 1}),
    "MiCS of 1, bf16": Mode((3,), BF16, {"mics_shard_size": 1}),
}


class Case(NamedTuple):
    """A mode at a stage, where a micro-batch fails, and whether it does so on the last rank alone."""

    mode: str
    stage: int
    where: str
    alone: bool


def legal(case: Case) -> bool:
    """Return whether the other ranks learn of the failure: in a forward without gathers nobody waits."""
    waits = case.stage == 3 and not case.mode.startswith("MiCS")
    return case.where != "forward" or not case.alone or waits


def fail(*_: Any) -> None:
    raise ArithmeticError("no luck")


def fail_in_backward(_module: Any, _args: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(fail)


def start(case: Case) -> Any:
    model = zoo.build("plain", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)
    mode = MODES[case.mode]
    settings = training.config(Run(dtype="fp32"), case.stage, dist.get_world_size(), **mode.zero)
    if mode.settings:
        del settings["data_types"]
    return zero_core.initialize(model=model, optimizer=optimizer, config={**settings, **mode.settings})[0]


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return zoo.batch(number, 0, dist.get_rank(), dist.get_world_size())


def step(engine: Any, number: int) -> None:
    engine.backward(sum(engine(*batch(number))))
    engine.step()


def fails(engine: Any, case: Case) -> str:
    """One micro-batch of a loop that catches what is raised."""
    block, handle = engine.module.blocks[1], None
    if not case.alone or dist.get_rank() == dist.get_world_size() - 1:
        if case.where == "forward":
            handle = block.register_forward_pre_hook(fail)
        elif case.where == "backward":
            handle = block.register_forward_hook(fail_in_backward)
        else:
            handle = engine.optimizer.register_step_pre_hook(fail)
    try:
        step(engine, FAILING)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if handle is not None:
            handle.remove()
    return "no error"


def saved(engine: Any, folder: str) -> dict[tuple[str, str], bytes]:
    """Every tensor of a checkpoint made now, by name and kind."""
    engine.save_checkpoint(folder, "saved")
    checkpoint = open_checkpoint(f"{folder}/saved")
    return {
        (entry.name, entry.kind): bytes(checkpoint.read(entry.name, entry.kind))
        for entry in checkpoint.manifest.tensors
    }


def facts(engine: Any, case: Case, folder: str) -> dict[str, Any]:
    """Return weights, checkpoint tensors, counters and loss scale, to be compared bitwise."""
    micro_batches = () if case.where == "step" else (engine.micro_steps, engine.global_samples)  # a step counts its own
    return {
        "weights": training.bits(training.weights(engine)),
        "saved": saved(engine, folder),
        "counters": (engine.global_steps, engine.skipped_steps, *micro_batches),
        "scale": engine.loss_scale() if callable(getattr(engine, "loss_scale", None)) else None,
    }


def trained(case: Case, failing: bool, folder: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The message of the failure, and the facts after it and at the end; without it its micro-batch is left out, or its
    gradients are where the step is what fails."""
    engine = start(case)
    for number in range(FAILING):
        step(engine, number)
    said = "no error"
    if failing:
        said = fails(engine, case)
    elif case.where == "step":
        engine.backward(sum(engine(*batch(FAILING))))
    if case.where == "step" or not failing:
        engine.zero_grad()
    soon = facts(engine, case, f"{folder}/soon")
    engine.zero_grad()
    for number in range(FAILING + 1, STEPS):
        step(engine, number)
    late = facts(engine, case, f"{folder}/late")
    engine.destroy(unshard=False)
    return said, soon, late


def outcome(case: Case, folder: str) -> tuple[str, list[str]]:
    """The message of the failure, and what differs from the run without it."""
    said, *ours = trained(case, True, f"{folder}/failing")
    _, *theirs = trained(case, False, f"{folder}/undisturbed")
    different = [
        f"{when}: {name} {a[name] if len(str(a[name])) < 50 else ''} {b[name] if len(str(b[name])) < 50 else ''}"
        for when, a, b in zip(("after the failure", "at the end"), ours, theirs, strict=True)
        for name in a
        if a[name] != b[name]
    ]
    return said, different


def all_cases(cases: list[Case], folder: str) -> list[tuple[str, list[str]]]:
    torch.set_num_threads(1)
    return [outcome(case, f"{folder}/{number}") for number, case in enumerate(cases)]


PRODUCT = [
    case
    for name, mode in MODES.items()
    for case in itertools.starmap(Case, itertools.product([name], mode.stages, WHERE, (False, True)))
    if legal(case)
]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (
            2,
            [
                Case("fp16, a scale that grows", 1, "step", True),
                Case("qgZ", 3, "backward", True),
                Case("audited", 3, "forward", True),
            ],
        ),
        *(pytest.param(n, [case], marks=SOAK, id=f"{n} ranks, {case}") for n in (2, 3) for case in PRODUCT),
    ],
)
def test_training_after_a_caught_failure_is_that_of_a_run_without_it(
    world_size: int, cases: list[Case], tmp_path: Path
) -> None:
    bad = []
    for rank, found in enumerate(run_ranks(all_cases, world_size, cases, str(tmp_path), timeout=300)):
        for case, (said, different) in zip(cases, found, strict=True):
            if different or said == "no error":
                bad.append((rank, case, said, different))
    assert not bad, "\n".join(map(str, bad))
