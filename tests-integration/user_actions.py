"""Random sequences of what user code does to a model and its optimizer, run with plain torch and with the engine.

A sequence follows from its seed alone. Every rank runs the plain model on the batch of all ranks beside its engine, so
values are compared where they are observed. An action that the engine refuses ends its sequence: every rank must refuse
it, the message must name a parameter or say what to write instead, and the weights must be those of a moment before.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

import zero_core
from zero_partition import PartitionError

ROWS = 6  # of a batch over all ranks; divisible by every world size tried
TOLERANCE = 1e-12
REFUSALS = (PartitionError, zero_core.UsageError, RuntimeError)


class Mistake(ValueError):
    """What the user's own module raises when it is told to."""


@dataclass(frozen=True)
class Case:
    """What a seed decides before the first action."""

    seed: int
    stage: int
    widths: tuple[int, ...]
    normed: bool
    tied: bool
    unused: bool
    late: str
    optimizer: str
    accumulation: int
    unit_min_numel: int
    persistence: int
    tier: str

    @classmethod
    def of(cls, seed: int) -> Case:
        """Draw the case of ``seed``."""
        rng = random.Random(f"case {seed}")
        width = rng.choice((3, 4, 5))
        return cls(
            seed=seed,
            stage=rng.randrange(4),
            widths=tuple([width] * rng.randint(2, 4)),
            normed=rng.random() < 0.5,
            tied=rng.random() < 0.3,
            unused=rng.random() < 0.3,
            late=rng.choice(("none", "trainable", "frozen")),
            optimizer=rng.choice(("adamw", "sgd")),
            accumulation=rng.choice((1, 1, 2)),
            unit_min_numel=rng.choice((1, 30, 1000)),
            persistence=rng.choice((0, 0, 10)),
            tier=rng.choice(("device", "device", "cpu")),
        )


class Block(nn.Module):
    """A linear layer whose forward can be told to fail."""

    def __init__(self, width_in: int, width_out: int, normed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width_in) if normed else nn.Identity()
        self.linear = nn.Linear(width_in, width_out)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise Mistake("the user's forward fails")
        return torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """A stack of blocks; the last can share its weight with the first, and ``late`` starts outside the optimizer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        widths = case.widths
        self.blocks = nn.ModuleList(Block(a, b, case.normed) for a, b in pairwise(widths))
        self.late = nn.Linear(widths[-1], widths[-1], bias=False)
        if case.late == "frozen":
            self.late.requires_grad_(False)
        self.head = nn.Linear(widths[-1], widths[0])
        if case.tied:
            self.head.weight = self.blocks[0].linear.weight
        if case.unused:
            self.unused = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x
        for block in self.blocks:
            h = block(h)
        return (self.head(h + self.late(h)) - y).square().mean()


def build(case: Case) -> Model:
    """The case's model in float64; the same values at every call."""
    torch.manual_seed(case.seed)
    return Model(case).double()


def optimizer_over(case: Case, model: Model) -> Optimizer:
    """The case's optimizer, without the parameter that joins later."""
    late = case.late != "none"
    chosen = [p for p in model.parameters() if not (late and p is model.late.weight)]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(chosen, lr=1e-2, weight_decay=0.1)
    return torch.optim.SGD(chosen, lr=1e-1, momentum=0.9)


def batch(case: Case, number: int, rank: int = 0, world_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank's rows of batch ``number``."""
    generator = torch.Generator().manual_seed(1000 * case.seed + number)
    width = case.widths[0]
    x = torch.randn(ROWS, width, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, width, generator=generator, dtype=torch.float64)
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return x[rows], y[rows]


@dataclass
class Plain:
    """One process with torch.optim on the batch of all ranks."""

    case: Case
    model: Model = field(init=False)
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model = build(self.case)
        self.optimizer = optimizer_over(self.case, self.model)
        self.slots: dict[int, Any] = {}

    def forward(self, number: int) -> torch.Tensor:
        return self.model(*batch(self.case, number))

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.case.accumulation).backward()

    def step(self, boundary: bool) -> None:
        if boundary:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def discard(self, _how: str) -> None:
        self.optimizer.zero_grad()

    def clip(self, how: str, bound: float) -> None:
        if how == "value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), bound)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), bound)

    def write(self, how: str, number: int, value: torch.Tensor) -> None:
        parameter = parameter_number(self.model, number)
        with torch.no_grad():
            if how in ("in place", "gathered in place"):
                parameter.mul_(0.5)
            elif how == "vector":
                vector_to_parameters(parameters_to_vector(self.model.parameters()) * 0.5, self.model.parameters())
            else:
                parameter.copy_(value)

    def save(self, slot: int) -> None:
        self.slots[slot] = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, slot: int) -> None:
        weights, states = self.slots[slot]
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(copy.deepcopy(states))
        self.optimizer.zero_grad()

    def evaluate(self, number: int, rank: int, world_size: int) -> torch.Tensor:
        with torch.no_grad():
            return self.model(*batch(self.case, number, rank, world_size))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class Sharded:
    """The engine on this rank, used as a script would use it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.folder = folder
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = build(case)
        zero: dict[str, Any] = {
            "stage": case.stage,
            "stage3_param_persistence_threshold": case.persistence,
            "stage3_prefetch_bucket_size": 50,
            "unit_min_numel": case.unit_min_numel,
        }
        if case.tier == "cpu" and case.stage > 0:
            zero["offload_optimizer"] = {"device": "cpu"}
        self.engine, self.optimizer, _, _ = zero_core.initialize(
            model=self.model,
            optimizer=optimizer_over(case, self.model),
            config={
                "train_micro_batch_size_per_gpu": ROWS // self.world_size,
                "gradient_accumulation_steps": case.accumulation,
                "gradient_clipping": 0.0,
                "steps_per_print": 0,
                "data_types": {"param_dtype": "fp64"},
                "zero_optimization": zero,
            },
        )

    def forward(self, number: int) -> torch.Tensor:
        return self.engine(*batch(self.case, number, self.rank, self.world_size))

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self, boundary: bool) -> None:
        self.engine.step()

    def discard(self, how: str) -> None:
        {"engine": self.engine, "optimizer": self.optimizer, "model": self.model}[how].zero_grad()

    def clip(self, how: str, bound: float) -> None:
        if how == "engine":
            self.engine.clip_grad_norm_(bound)
        elif how == "value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), bound)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), bound)

    def write(self, how: str, number: int, value: torch.Tensor) -> None:
        parameter = parameter_number(self.model, number)
        with torch.no_grad():
            if how == "in place":
                parameter.mul_(0.5)
            elif how == "gathered in place":
                with self.engine.gathered(parameter, modifier_rank=0):
                    parameter.mul_(0.5)
            elif how == "gathered data":
                with self.engine.gathered(parameter, modifier_rank=0):
                    parameter.data = value.clone()
            elif how == "vector":
                with self.engine.gathered(list(self.model.parameters())):
                    flat = parameters_to_vector(self.model.parameters()) * 0.5
                vector_to_parameters(flat, self.model.parameters())
            elif how == "data":
                parameter.data = value.clone()
            elif how == "copy":
                parameter.data.copy_(value)
            else:
                self.engine.set_full_param(parameter, value)

    def save(self, slot: int) -> None:
        self.engine.save_checkpoint(self.folder, tag=f"slot{slot}")

    def load(self, slot: int) -> None:
        self.engine.load_checkpoint(self.folder, tag=f"slot{slot}")

    def evaluate(self, number: int) -> torch.Tensor:
        with torch.no_grad():
            return self.engine(*batch(self.case, number, self.rank, self.world_size))

    def weights(self) -> dict[str, torch.Tensor]:
        found = self.engine.partition.find
        return {
            name: self.engine.full_param(p) if found(p) else p.detach().clone()
            for name, p in self.model.named_parameters()
        }


def parameter_number(model: Model, number: int) -> nn.Parameter:
    """A parameter by number, counted round the model."""
    parameters = [p for p in model.parameters() if p.numel() > 1]
    return parameters[number % len(parameters)]


Run = Plain | Sharded
Apply = Callable[[Run], "torch.Tensor | None"]


@dataclass(frozen=True)
class Action:
    """One thing that user code does; ``apply`` does it to either run, ``trains`` when it ends in a step."""

    name: str
    apply: Apply
    trains: bool = False


def micro_batches(run: Run, first: int, before_step: Apply | None = None) -> None:
    """One optimizer step; ``before_step`` runs between the last backward and the step."""
    for micro in range(run.case.accumulation):
        last = micro == run.case.accumulation - 1
        run.backward(run.forward(first + micro))
        if last and before_step is not None:
            before_step(run)
        run.step(last)


def draw(case: Case) -> Iterator[Action]:
    """The case's actions, in order; a checkpoint is loaded only after it was saved."""
    rng = random.Random(f"actions {case.seed}")
    saved: list[int] = []
    joined = case.late == "none"
    kinds = ("train", "train", "skip", "read", "evaluate", "write", "write", "clip", "gradient", "freeze", "rate")
    kinds += ("save", "load", "deepcopy", "join", "fail")
    for position in range(rng.randint(3, 10)):
        kind = rng.choice(kinds)
        number = 10 * position
        if kind == "load" and not saved:
            kind = "save"
        if kind == "join" and joined:
            kind = "train"
        if kind == "skip" and case.accumulation > 1:
            kind = "train"
        if kind == "save":
            saved.append(position)
            yield Action(f"save slot {position}", lambda run, slot=position: run.save(slot))
        elif kind == "load":
            chosen = rng.choice(saved)
            yield Action(f"load slot {chosen}", lambda run, slot=chosen: run.load(slot))
        elif kind == "join":
            joined = True
            yield Action("add_param_group", join)
        else:
            yield MAKERS[kind](rng, number)
    yield MAKERS["train"](rng, 990)
    yield MAKERS["read"](rng, 0)


def join(run: Run) -> None:
    """Gradual unfreezing: the late parameter gets a group of its own."""
    weight = run.model.late.weight
    weight.requires_grad_(True)
    run.optimizer.add_param_group({"params": [weight], "lr": 5e-3})


def make_train(_rng: random.Random, number: int) -> Action:
    return Action("train", lambda run: micro_batches(run, number), trains=True)


def make_skip(rng: random.Random, number: int) -> Action:
    how = rng.choice(("engine", "optimizer", "model"))

    def skip(run: Run) -> None:
        run.backward(run.forward(number))
        run.discard(how)

    return Action(f"skip a batch by {how}.zero_grad()", skip)


def make_read(_rng: random.Random, _number: int) -> Action:
    return Action("read", lambda run: None)


def make_evaluate(_rng: random.Random, number: int) -> Action:
    def evaluate(run: Run) -> torch.Tensor:
        if isinstance(run, Sharded):
            return run.evaluate(number)
        return run.evaluate(number, dist.get_rank(), dist.get_world_size())

    return Action("evaluate", evaluate)


def make_write(rng: random.Random, _number: int) -> Action:
    how = rng.choice(("in place", "gathered in place", "gathered data", "vector", "data", "copy", "set_full_param"))
    which, seed = rng.randrange(100), rng.randrange(1000)

    def write(run: Run) -> None:
        shape = parameter_number(run.model, which).shape
        value = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2
        run.write(how, which, value)

    return Action(f"write parameter {which}: {how}", write)


def make_clip(rng: random.Random, number: int) -> Action:
    how = rng.choice(("engine", "norm", "value"))
    bound = rng.choice((1e-3, 1e-2, 10.0))
    return Action(
        f"clip by {how} to {bound}", lambda run: micro_batches(run, number, lambda r: r.clip(how, bound)), trains=True
    )


def make_gradient(rng: random.Random, number: int) -> Action:
    which = rng.randrange(100)

    def assign(run: Run) -> None:
        parameter = parameter_number(run.model, which)
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.25)

    return Action(f"assign .grad of parameter {which}", lambda run: micro_batches(run, number, assign), trains=True)


def make_freeze(rng: random.Random, number: int) -> Action:
    which = rng.randrange(100)

    def freeze(run: Run) -> None:
        parameter = parameter_number(run.model, which)
        if not parameter.requires_grad:
            return
        parameter.requires_grad_(False)
        micro_batches(run, number)
        parameter.requires_grad_(True)

    return Action(f"freeze parameter {which} for a step", freeze, trains=True)


def make_rate(rng: random.Random, _number: int) -> Action:
    rate = rng.choice((1e-3, 5e-2))

    def set_rate(run: Run) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = rate

    return Action(f"lr = {rate}", set_rate)


def make_deepcopy(_rng: random.Random, number: int) -> Action:
    def copied(run: Run) -> torch.Tensor:
        twin = copy.deepcopy(run.model)
        with torch.no_grad():
            return twin(*batch(run.case, number, dist.get_rank(), dist.get_world_size()))

    return Action("deepcopy", copied)


def make_fail(rng: random.Random, number: int) -> Action:
    where = rng.choice(("forward", "backward"))
    which = rng.randrange(100)

    def fail(run: Run) -> None:
        block = run.model.blocks[which % len(run.model.blocks)]
        block.fails = where == "forward"
        handle = None
        if where == "backward":
            handle = block.register_full_backward_hook(raise_mistake)
        try:
            run.backward(run.forward(number))
        except Mistake:
            run.discard("engine")
        else:
            raise LookupError("the user's mistake was not raised")
        finally:
            block.fails = False
            if handle is not None:
                handle.remove()

    return Action(f"catch a failure in {where} of block {which}", fail)


def raise_mistake(*_: Any) -> None:
    raise Mistake("the user's backward hook fails")


MAKERS: dict[str, Callable[[random.Random, int], Action]] = {
    "train": make_train,
    "skip": make_skip,
    "read": make_read,
    "evaluate": make_evaluate,
    "write": make_write,
    "clip": make_clip,
    "gradient": make_gradient,
    "freeze": make_freeze,
    "rate": make_rate,
    "deepcopy": make_deepcopy,
    "fail": make_fail,
}


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


def run_case(seed: int) -> Verdict:
    """One sequence on this job's ranks."""
    case = Case.of(seed)
    done: list[str] = []
    with shared_folder() as folder:
        plain, ours = Plain(case), Sharded(case, folder)
        snapshots = [plain.weights()]
        for action in draw(case):
            done.append(action.name)
            value, failure = attempt(action, ours)
            outcomes = everyones("" if failure is None else f"{type(failure).__name__}: {failure}")
            if any(outcomes):
                return Verdict(seed, tuple(done), refused=outcomes[0], wrong=judge(ours, outcomes, failure, snapshots))
            expected = action.apply(plain)
            if action.trains:
                snapshots.clear()
            snapshots.append(plain.weights())
            if isinstance(expected, torch.Tensor) and value is not None:
                worst = deviation({"value": value}, {"value": expected.detach()})[0]
                wrong = f"the value is {worst:.1e} off" if worst > TOLERANCE else ""
            elif action.name == "read":
                worst, where = deviation(ours.weights(), plain.weights())
                wrong = f"'{where}' is {worst:.1e} off" if worst > TOLERANCE else ""
            else:
                wrong = ""
            wrongs = everyones(wrong)
            if any(wrongs):
                ours.engine.destroy()
                return Verdict(seed, tuple(done), wrong=next(filter(None, wrongs)))
        ours.engine.destroy()
    return Verdict(seed, tuple(done))


def attempt(action: Action, ours: Sharded) -> tuple[torch.Tensor | None, Exception | None]:
    """Do the action to the engine; return its value and what it raised."""
    try:
        return action.apply(ours), None
    except Exception as failure:  # judged below, with its type
        return None, failure


def judge(
    ours: Sharded, outcomes: list[str], failure: Exception | None, snapshots: list[dict[str, torch.Tensor]]
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
            if worst > TOLERANCE:
                complaint = f"after '{outcomes[0]}' the weights are {worst:.1e} off those before"
    complaints = everyones(complaint)
    if not any(complaints):
        ours.engine.destroy()
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


def run_cases(seeds: range) -> list[Verdict]:
    """Sequences of ``seeds`` up to the first that is wrong, whose engine may be beyond use."""
    verdicts = []
    for seed in seeds:
        verdicts.append(run_case(seed))
        if verdicts[-1].wrong:
            break
    return verdicts
