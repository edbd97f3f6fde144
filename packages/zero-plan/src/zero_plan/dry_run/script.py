"""One rank's run of the user's own script without memory, up to its first steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from zero_core.engine import Engine
from zero_core.supervision import run_as_main
from zero_core.training import Observer, Unobserved
from zero_partition import StepResult

from ..errors import PlanError
from ..planned import RankPlan
from ..scripts import Script, ScriptRank
from .books import Books
from .fakes import PlanMode
from .guesses import Guesses, ScriptReads
from .lines import sentence
from .rank import STEPS, dry, only_without_memory, without_values
from .saving import rehearse_save
from .supervising import Rehearsal


class StepsTaken(BaseException):
    """The engine of the script has taken the steps that a plan needs."""


class ScriptRehearsal(Rehearsal):
    """Follows the engine of a script that trains, and ends the script after its steps.

    Attributes:
        found: the plan, after that.
        steps: the steps that were taken.
    """

    def __init__(self, folder: Path, asked: ScriptRank, books: Books) -> None:
        super().__init__(folder)
        self.found: RankPlan | None = None
        self.steps = 0
        self._asked = asked
        self._books = books
        self._followed: Engine | None = None

    def config(self, given: Any, world_size: int) -> dict[str, Any]:
        """Return the configuration for the script's engine; see `Rehearsal.config`."""
        self._books.watch.begin_engine()
        found = filled(self._asked.script.config, _plain(given))
        if self._asked.ranks_per_node is not None:
            found["comm"] = {**found.get("comm", {}), "ranks_per_node": self._asked.ranks_per_node}
        return super().config(found, world_size)

    def observer(self, engine: Engine) -> Observer:
        """Return the one who follows the engine. Raises `PlanError` for a second one that trains."""
        super().observer(engine)
        if engine.optimizer is None:
            return Unobserved()
        if self._followed is not None:
            raise PlanError("a dry run follows one engine that trains, and the script makes a second")
        self._followed = engine
        engine.register_forward_pre_hook(self._forward, with_kwargs=True)
        self._books.watch.follow(engine)
        self._books.begin_step(engine)
        return _Phases(engine, self)

    def begin(self, phase: str) -> None:
        """The engine begins another phase."""
        self._books.watch.phase = phase

    def after_step(self, engine: Engine) -> None:
        """A step is over; after the last, keep the plan and end the script."""
        self.steps += 1
        if self.steps == STEPS:
            self.found = self._books.plan(engine)
            if self._asked.checkpoint:
                self.found = replace(self.found, saved=rehearse_save(engine, self._books.watch, self.folder))
            raise StepsTaken
        self._books.begin_step(engine)

    def close(self) -> None:
        """Have the engine leave its process groups."""
        if self._followed is not None:
            self._followed.destroy(unshard=False)

    def _forward(self, _engine: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self.begin("forward")
        return tree_map(_on_device, (args, kwargs))


class _Phases:
    """Tells a rehearsal of the phases of its engine; a `zero_core.training.Observer`."""

    def __init__(self, engine: Engine, rehearsal: ScriptRehearsal) -> None:
        self._engine = engine
        self._rehearsal = rehearsal

    def loss(self, _loss: torch.Tensor) -> None:
        """A backward pass begins."""
        self._rehearsal.begin("backward")

    def before_step(self) -> None:
        """A step begins."""
        self._rehearsal.begin("step")

    def after_step(self, _result: StepResult) -> None:
        """A step is over."""
        self._rehearsal.after_step(self._engine)


def rehearse_script(given: ScriptRank) -> tuple[RankPlan, list[str]]:
    """Return the plan of one rank that runs a script, and the lines that asked for values and were answered.

    Raises `PlanError` for a script that fails, naming its line, and for one that does not take the steps.
    """
    books = Books()
    guesses = Guesses(lambda: books.watch.computing)
    with TemporaryDirectory(prefix="zero-plan-") as folder:
        rehearsal = ScriptRehearsal(Path(folder), given, books)
        with (
            _environment(given),
            dry(rehearsal, given.rank, given.world_size, books),
            PlanMode(books.watch.memory, books.operations, guesses),
            ScriptReads(guesses),
            only_without_memory(),
        ):
            try:
                _run(given.script)
            except StepsTaken:
                pass
            finally:
                rehearsal.close()
    if rehearsal.found is None:
        raise PlanError(_too_few(given.script.target, rehearsal.steps))
    return rehearsal.found, list(guesses.lines)


def filled(config: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with what the script gives in the place of "auto"; without one, what the script gives."""
    if config is None:
        return given
    found: dict[str, Any] = {}
    for key, value in config.items():
        other = given.get(key)
        if isinstance(value, dict):
            found[key] = filled(value, other if isinstance(other, dict) else {})
        elif value != "auto" or other is None:
            found[key] = value
        else:
            found[key] = other
    return found


def _plain(given: Any) -> dict[str, Any]:
    from zero_config import Config, read

    return dict(given.raw) if isinstance(given, Config) else read(given)


def _run(script: Script) -> None:
    try:
        run_as_main(script.target, script.arguments, module=script.module)
    except SystemExit as end:
        if end.code:
            raise PlanError(f"{script.target} ended with status {end.code} before its first steps") from end
    except Exception as error:
        raise PlanError(sentence(error, script.target)) from error


def _too_few(target: str, steps: int) -> str:
    expected = "expected a script that calls zero_core.initialize with an optimizer, engine.backward and engine.step"
    if not steps:
        return f"{target} took no optimizer step: {expected}"
    return (
        f"{target} ended after {steps} of the {STEPS} optimizer steps that a plan needs: the engine learns its orders "
        "in the first two. Give it more data, or steps; each rank has its own share"
    )


def _on_device(value: Any) -> Any:
    """Have what the model is called with count as memory of the device, but for numbers that are read."""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return without_values(value) if plain and value.is_floating_point() else value


@contextmanager
def _environment(given: ScriptRank) -> Iterator[None]:
    """Set what a launcher sets for a rank."""
    per_node = given.ranks_per_node or given.world_size
    numbers: Mapping[str, object] = {
        "RANK": given.rank,
        "WORLD_SIZE": given.world_size,
        "LOCAL_RANK": given.rank % per_node,
        "LOCAL_WORLD_SIZE": min(per_node, given.world_size),
        "GROUP_RANK": given.rank // per_node,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    before = {name: os.environ.get(name) for name in numbers}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
