"""Random sequences of what user code does to a model and its optimizer, run with plain torch and with the engine.

A sequence follows from its seed alone. Every rank runs the references beside its engine, and values are compared where
they are observed: in float64 with one process on the batch of all ranks; in bfloat16, to the bit, with one process that
has masters (`PlainMasters`) and with a second engine at the lowest stage.

An action that the engine refuses has to be refused on every rank, by a message of action_refusals.py, with weights,
masters and states as before. The sequence continues: with what the message says to do instead, or without the action.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from action_cases import Case
from action_kinds import Action, Apply
from action_masters import PlainMasters
from action_refusals import Refusal, refusal_of
from action_runs import Plain, Run, Sharded
from actions import draw

TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 0.0}


class WrongError(Exception):
    """Something is not as in plain torch; raised on every rank."""


@dataclass(frozen=True)
class Verdict:
    """How a sequence ended: ``wrong`` says what differs from plain torch, "" for nothing; ``refused``: kinds."""

    seed: int
    done: tuple[str, ...]
    refused: tuple[str, ...] = ()
    wrong: str = ""


class Drawn:
    """One sequence: the engine, what it is compared with, and what has been done."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.references: dict[str, Run] = {"plain torch": Plain(case)}
        if case.dtype is torch.bfloat16:
            self.references = {
                "plain torch": PlainMasters(case),
                "the lowest stage": Sharded(case.twin(), folder / "twin"),
            }
        self.ours = Sharded(case, folder)
        self.names = {name for name, _ in self.ours.model.named_parameters()}
        self.done: list[str] = []
        self.refused: list[str] = []
        self._complaints: list[str] = []

    def run(self) -> None:
        """Do all actions. Raises `WrongError` on every rank."""
        for position, action in enumerate(draw(self.case)):
            self.done.append(action.name)
            value, failure = attempt(action.apply, self.ours)
            refusal = None if failure is None else refusal_of(failure, self.names)
            kind = refusal.kind if refusal is not None else "not documented"
            outcomes = everyones("" if failure is None else f"{type(failure).__name__}, {kind}: {failure}")
            if len({outcome.partition(":")[0] for outcome in outcomes}) > 1:
                raise WrongError(f"not the same on all ranks: {outcomes}")
            if failure is not None:
                if refusal is not None:
                    self._go_on(action, position, refusal)
                else:
                    self._expect_the_same(action, failure)
                continue
            for which, reference in self.references.items():
                expected = self._do(action.apply, reference, which)
                if isinstance(expected, torch.Tensor) and value is not None:
                    self._compare(which, "value", {"": value}, {"": expected.detach()})
            if action.name == "read":
                self._compare_all()
            self._settle()

    def close(self) -> None:
        for run in (*self.references.values(), self.ours):
            run.close()

    def _go_on(self, action: Action, position: int, refusal: Refusal) -> None:
        """Go on after a refusal as its message says, or without the action, from what was there before."""
        self.refused.append(refusal.kind)
        self.done[-1] += f", refused: {refusal.kind}"
        self._compare_all()
        self._settle()
        instead = action.instead
        if instead is not None and random.Random(f"after {self.case.seed} {position}").random() < 0.5:
            self.done[-1] += ", done as it says"
            self._do(instead.here, self.ours, "what the refusal says")
            self._do_to_references(instead.from_the_start)
        elif action.trains:
            self._do(action.give_up, self.ours, "skipping what was refused")
            self._do_to_references(lambda run: run.discard("engine"))
        self._settle()

    def _expect_the_same(self, action: Action, failure: Exception) -> None:
        """Do the action to the references, which have to raise what the engine raised."""
        if type(failure).__module__.startswith("zero_"):
            self._complaints.append(f"not a refusal that is documented: {type(failure).__name__}: {failure}")
        for which, reference in self.references.items():
            _, theirs = attempt(action.apply, reference)
            if type(theirs) is not type(failure):
                self._complaints.append(f"{type(failure).__name__}: {failure}, and in {which}: {theirs!r}")
        self._settle()

    def _do(self, apply: Callable[[Run], Any], run: Run, doing: str) -> Any:
        """Return what ``apply`` returns; note what it raises."""
        value, failure = attempt(apply, run)
        if failure is not None:
            self._complaints.append(f"{doing}: {type(failure).__name__}: {failure}")
        return value

    def _do_to_references(self, apply: Apply) -> None:
        for which, reference in self.references.items():
            self._do(apply, reference, which)

    def _compare_all(self) -> None:
        """Compare weights as the optimizer has them, as forward reads them, and the optimizer's states."""
        what: dict[str, Callable[[Run], dict[str, torch.Tensor]]] = {
            "weight": lambda run: run.weights(),
            "published weight": lambda run: run.published(),
            "state": lambda run: run.states(),
        }
        for kind, read in what.items():
            ours = self._do(read, self.ours, f"reading each {kind}")
            for which, reference in self.references.items():
                theirs = read(reference)
                if ours is not None:
                    self._compare(which, kind, ours, theirs)

    def _compare(self, which: str, kind: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
        worst, where = deviation(ours, theirs)
        if worst > TOLERANCE[self.case.dtype]:
            self._complaints.append(f"the {kind} '{where}' is {worst:.1e} off {which}")

    def _settle(self) -> None:
        """Raise `WrongError` on every rank if any has a complaint."""
        complaints = [
            f"rank {rank}: {text}" for rank, text in enumerate(everyones("; ".join(self._complaints))) if text
        ]
        if complaints:
            raise WrongError(complaints[0])


def run_case(seed: int, dtype: torch.dtype, device: str) -> Verdict:
    """One sequence on this job's ranks."""
    with shared_folder() as folder:
        sequence = Drawn(Case.of(seed, dtype, device), folder)
        wrong = ""
        try:
            sequence.run()
        except WrongError as found:
            wrong = str(found)
        else:
            sequence.close()
        return Verdict(seed, tuple(sequence.done), tuple(sequence.refused), wrong)


def attempt(apply: Callable[[Run], Any], run: Run) -> tuple[Any, Exception | None]:
    """Do an action; return its value and what it raised."""
    try:
        return apply(run), None
    except Exception as failure:  # judged by the caller
        return None, failure


def deviation(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest difference relative to max(1, value), and the parameter where it is."""
    worst, where = 0.0, ""
    for name, value in theirs.items():
        exact = value.double().cpu()
        difference = ((ours[name].double().cpu() - exact).abs() / exact.abs().clamp_min(1.0)).nan_to_num(
            nan=float("inf")
        )
        if difference.numel() and float(difference.max()) > worst:
            worst, where = float(difference.max()), name
    return worst, where


def everyones(text: str) -> list[str]:
    """Every rank's text, in rank order."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that rank 0 makes and removes, and every rank knows."""
    own = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
    try:
        yield Path(everyones(own.name if own is not None else "")[0])
    finally:
        dist.barrier()
        if own is not None:
            own.cleanup()


def run_cases(seeds: Sequence[int], dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Verdict]:
    """Sequences of ``seeds`` up to the first that is wrong, whose engine may be beyond use."""
    verdicts = []
    for seed in seeds:
        verdicts.append(run_case(seed, dtype, device))
        if verdicts[-1].wrong:
            break
    return verdicts
