"""Random sequences of what user code does to a model and its optimizer, run with plain torch and with the engine.

A sequence follows from its seed alone. Every rank runs the plain model on the batch of all ranks beside its engine, so
values are compared where they are observed; in bfloat16 a second engine, at the lowest stage, has to have the same
bits. An action that the engine refuses ends its sequence: every rank must refuse
it, the message must name a parameter or say what to write instead, and the weights must be those of a moment before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from action_cases import Case
from action_runs import Plain, Run, Sharded
from actions import Action, draw

import zero_core
from zero_partition import PartitionError

TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 0.0}
REFUSALS = (PartitionError, zero_core.UsageError, RuntimeError)


def deviation(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest difference relative to max(1, value), and the parameter where it is."""
    worst, where = 0.0, ""
    for name, value in theirs.items():
        difference = ((ours[name].double() - value).abs() / value.abs().clamp_min(1.0)).nan_to_num(nan=float("inf"))
        if difference.numel() and float(difference.max()) > worst:
            worst, where = float(difference.max()), name
    return worst, where


@dataclass(frozen=True)
class Verdict:
    """How a sequence ended: ``wrong`` says what differs from plain torch, "" for nothing; ``refused`` what was."""

    seed: int
    done: tuple[str, ...]
    refused: str = ""
    wrong: str = ""


def run_case(seed: int, dtype: torch.dtype) -> Verdict:
    """One sequence on this job's ranks."""
    case = Case.of(seed, dtype)
    done: list[str] = []
    tolerance = TOLERANCE[dtype]
    with shared_folder() as folder:
        plain: Run = Plain(case) if dtype is torch.float64 else Sharded(case.twin(), folder / "twin")
        ours = Sharded(case, folder)
        snapshots = [plain.weights()]
        for action in draw(case):
            done.append(action.name)
            value, failure = attempt(action, ours)
            outcomes = everyones("" if failure is None else f"{type(failure).__name__}: {failure}")
            if any(outcomes):
                plain.close()
                complaint = judge(ours, outcomes, failure, snapshots, tolerance)
                return Verdict(seed, tuple(done), refused=outcomes[0], wrong=complaint)
            expected = action.apply(plain)
            if action.trains:
                snapshots.clear()
            snapshots.append(plain.weights())
            if isinstance(expected, torch.Tensor) and value is not None:
                worst = deviation({"value": value}, {"value": expected.detach()})[0]
                wrong = f"the value is {worst:.1e} off" if worst > tolerance else ""
            elif action.name == "read":
                worst, where = deviation(ours.weights(), plain.weights())
                wrong = f"'{where}' is {worst:.1e} off" if worst > tolerance else ""
            else:
                wrong = ""
            wrongs = everyones(wrong)
            if any(wrongs):
                plain.close()
                ours.close()
                return Verdict(seed, tuple(done), wrong=next(filter(None, wrongs)))
        plain.close()
        ours.close()
    return Verdict(seed, tuple(done))


def attempt(action: Action, ours: Sharded) -> tuple[torch.Tensor | None, Exception | None]:
    """Do the action to the engine; return its value and what it raised."""
    try:
        return action.apply(ours), None
    except Exception as failure:  # judged below, with its type
        return None, failure


def judge(
    ours: Sharded,
    outcomes: list[str],
    failure: Exception | None,
    snapshots: list[dict[str, torch.Tensor]],
    tolerance: float,
) -> str:
    """What is wrong with a refusal; "" for nothing."""
    if not all(outcomes):
        return f"only some ranks refused: {outcomes}"
    complaint = ""
    if not isinstance(failure, REFUSALS):
        complaint = f"not a refusal by name: {outcomes[0]}"
    if complaint == "":
        try:
            weights = ours.weights()
        except Exception as unreadable:  # reported, not handled
            complaint = f"after '{outcomes[0]}' weights cannot be read: {type(unreadable).__name__}: {unreadable}"
        else:
            worst = min(deviation(weights, snapshot)[0] for snapshot in snapshots)
            if worst > tolerance:
                complaint = f"after '{outcomes[0]}' the weights are {worst:.1e} off those before"
    complaints = everyones(complaint)
    if not any(complaints):
        ours.close()
    return next(filter(None, complaints), "")


def everyones(text: str) -> list[str]:
    """Every rank's text, in rank order."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


class shared_folder:
    """A folder that rank 0 makes and removes, and every rank knows."""

    def __enter__(self) -> Path:
        self._own = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
        return Path(everyones(self._own.name if self._own is not None else "")[0])

    def __exit__(self, *_: object) -> None:
        dist.barrier()
        if self._own is not None:
            self._own.cleanup()


def run_cases(seeds: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Verdict]:
    """Sequences of ``seeds`` up to the first that is wrong, whose engine may be beyond use."""
    verdicts = []
    for seed in seeds:
        verdicts.append(run_case(seed, dtype))
        if verdicts[-1].wrong:
            break
    return verdicts
