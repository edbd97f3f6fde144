"""The dry run of the user's own script as one rank, up to its engine's first steps."""

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
from zero_core.training import Observer, Unobserved
from zero_launch.scripts import run_as_main
from zero_partition import StepResult

from ..errors import PlanError
from ..planned import LoadedPlan, RankPlan
from ..scripts import Script, ScriptRank
from .fakes import PlanMode
from .guesses import Guesses, ScriptReads
from .lines import describe_error, user_line
from .loading import plan_load
from .parts import decode_manifest
from .rank import STEPS, dry_run_context, refuse_real_parameters, without_values
from .recorder import DryRunRecorder
from .saving import plan_save
from .supervising import DryRunSupervisor


class StepsTaken(BaseException):
    """Raised through the script to end it, once its engine has taken the steps that a plan needs."""


class ScriptSupervisor(DryRunSupervisor):
    """A `zero_core.supervision.Supervisor` of a script's engines: it measures the one that trains, and ends the script
    after `STEPS` steps of it.

    ``folder``: see `DryRunSupervisor`. ``asked``: the script and its rank. ``recorder``: measures the engine.

    Attributes:
        found: the plan; None until the last step has ended.
        loaded: the plan of a load, if one was asked for; None until it has ended.
        steps: how many steps the engine has taken.
    """

    def __init__(self, folder: Path, asked: ScriptRank, recorder: DryRunRecorder) -> None:
        super().__init__(folder)
        self.found: RankPlan | None = None
        self.loaded: LoadedPlan | None = None
        self.steps = 0
        self._asked = asked
        self._recorder = recorder
        self._followed: Engine | None = None

    def config(self, given: Any, world_size: int) -> dict[str, Any]:
        """Return the configuration for the script's engine: the one asked for, with the values of ``given``, the
        script's, in place of "auto", and with the ranks per node asked for, changed as by `DryRunSupervisor.config`.

        Called before an engine is made: memory that is live now counts as the script's.
        """
        self._recorder.watch.begin_engine()
        found = fill_auto(self._asked.script.config, _config_as_dict(given))
        if self._asked.ranks_per_node is not None:
            found["comm"] = {**found.get("comm", {}), "ranks_per_node": self._asked.ranks_per_node}
        return super().config(found, world_size)

    def observer(self, engine: Engine) -> Observer:
        """Start measuring ``engine`` and return its observer; an engine without an optimizer is not measured. If a load
        was asked for, measure the load and raise `StepsTaken`.

        Raises `PlanError` for a second engine with an optimizer.
        """
        super().observer(engine)
        if engine.optimizer is None:
            return Unobserved()
        if self._followed is not None:
            raise PlanError("a dry run follows one engine that trains, and the script makes a second")
        self._followed = engine
        engine.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._recorder.watch.follow(engine)
        if self._asked.manifest is not None:
            manifest = decode_manifest(Path(self._asked.manifest).read_bytes())
            self.loaded = plan_load(engine, self._recorder, self.folder, manifest, self._asked.saved_by)
            self._followed = None  # what is raised in its initialization closes its process groups
            raise StepsTaken
        self._recorder.begin_step(engine)
        return _PhaseObserver(engine, self)

    def begin_phase(self, phase: str) -> None:
        """Set the phase of training ("forward", "backward" or "step") to which later peaks of memory belong."""
        self._recorder.watch.phase = phase

    def after_step(self, engine: Engine) -> None:
        """Count a finished step of ``engine`` and begin to measure the next; after the last, set `found` and raise
        `StepsTaken`.
        """
        self.steps += 1
        if self.steps == STEPS:
            self.found = self._recorder.plan(engine)
            if self._asked.checkpoint:
                saved, part = plan_save(engine, self._recorder.watch, self.folder)
                self.found = replace(self.found, saved=saved)
                if self._asked.part is not None:
                    Path(self._asked.part).write_bytes(part.encode())
            raise StepsTaken
        self._recorder.begin_step(engine)

    def close(self) -> None:
        """Destroy the engine that was measured, so that it leaves its process groups; do nothing if the script made
        none that trains.
        """
        if self._followed is not None:
            self._followed.destroy(unshard=False)

    def _before_forward(self, _engine: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin the phase "forward", and return (args, kwargs) with fake tensors in place of real floating-point ones.
        A forward pre-hook of the engine.
        """
        self.begin_phase("forward")
        return tree_map(_without_float_values, (args, kwargs))


class _PhaseObserver:
    """A `zero_core.training.Observer` that passes the phases and steps of ``engine`` on to ``supervisor``."""

    def __init__(self, engine: Engine, supervisor: ScriptSupervisor) -> None:
        self._engine = engine
        self._supervisor = supervisor

    def loss(self, _loss: torch.Tensor) -> None:
        """Begin the phase "backward". Called by the engine before each backward pass."""
        self._supervisor.begin_phase("backward")

    def before_step(self) -> None:
        """Begin the phase "step". Called by the engine before each optimizer step."""
        self._supervisor.begin_phase("step")

    def after_step(self, _result: StepResult) -> None:
        """Count the step that has ended; may raise `StepsTaken`, which ends the script."""
        self._supervisor.after_step(self._engine)


def plan_script_rank(given: ScriptRank) -> tuple[RankPlan, list[str]]:
    """Run the script of ``given`` as its rank, until its engine has taken `STEPS` steps. Return (plan, lines): the
    rank's plan, and the lines of code that read values and got guesses.

    Raises `PlanError` for a script that fails, naming its line, and for one that ends before those steps.
    """
    supervisor, lines = _run_dry(given)
    if supervisor.found is None:
        raise PlanError(_too_few_steps(given.script.target, supervisor.steps))
    return supervisor.found, lines


def plan_script_load(given: ScriptRank) -> LoadedPlan:
    """Run the script of ``given`` as its rank until it has made its engine; return what loading the checkpoint of
    ``given.manifest`` into that engine needs.

    Raises `PlanError` for a script that fails, naming its line, and for one that makes no engine that trains.
    """
    supervisor, _ = _run_dry(given)
    if supervisor.loaded is None:
        raise PlanError(_too_few_steps(given.script.target, 0))
    return supervisor.loaded


def _run_dry(given: ScriptRank) -> tuple[ScriptSupervisor, list[str]]:
    """Run the script of ``given`` as its rank, until the plan that is asked for is known or the script ends. Return its
    supervisor, and the lines of code that read values and got guesses. Raises `PlanError` for a script that fails,
    naming its line.
    """
    recorder = DryRunRecorder()
    guesses = Guesses(lambda: recorder.watch.computing)
    with TemporaryDirectory(prefix="zero-plan-") as folder:
        supervisor = ScriptSupervisor(Path(folder), given, recorder)
        with (
            _launcher_environment(given),
            dry_run_context(supervisor, given.rank, given.world_size, recorder),
            PlanMode(recorder.watch.memory, recorder.operations, guesses),
            ScriptReads(guesses),
            refuse_real_parameters(),
        ):
            try:
                _run_script(given.script)
            except StepsTaken:
                pass
            finally:
                supervisor.close()
    return supervisor, list(guesses.lines)


def fill_auto(config: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the values of ``given``, the script's configuration, in place of "auto", at any depth;
    ``given`` itself if ``config`` is None. An "auto" for which the script has no value stays.
    """
    if config is None:
        return given
    found: dict[str, Any] = {}
    for key, value in config.items():
        other = given.get(key)
        if isinstance(value, dict):
            found[key] = fill_auto(value, other if isinstance(other, dict) else {})
        elif value != "auto" or other is None:
            found[key] = value
        else:
            found[key] = other
    return found


def _config_as_dict(given: Any) -> dict[str, Any]:
    """Return as a dict the configuration ``given`` that a script passes to `initialize`: a `Config`, a path or
    a dict.
    """
    from zero_settings import Config, read

    return dict(given.raw) if isinstance(given, Config) else read(given)


def _run_script(script: Script) -> None:
    """Run ``script`` as the main program of this process. Raises `PlanError` for its errors and for a nonzero exit
    status.
    """
    try:
        run_as_main(script.target, script.arguments, module=script.module)
    except SystemExit as end:
        if end.code:
            said = f"with status {end.code}" if isinstance(end.code, int) else f'by sys.exit("{end.code}")'
            place = user_line(end.__traceback__) or script.target
            raise PlanError(f"{place}: the script ended {said} before its first steps") from end
    except Exception as error:
        raise PlanError(describe_error(error, script.target)) from error


def _too_few_steps(target: str, steps: int) -> str:
    """Return the error message for the script ``target``, which ended after ``steps`` optimizer steps, fewer than
    `STEPS`.
    """
    expected = "expected a script that calls zero_core.initialize with an optimizer, engine.backward and engine.step"
    if not steps:
        return f"{target} took no optimizer step: {expected}"
    return (
        f"{target} ended after {steps} of the {STEPS} optimizer steps that a plan needs: the engine learns its orders "
        "in the first two. Give it more data, or steps; each rank has its own share"
    )


def _without_float_values(value: Any) -> Any:
    """Return a fake tensor in place of a real floating-point one, so that the model's inputs count as device memory.
    Any other value is returned unchanged: the model may read the values of integers.
    """
    plain = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return without_values(value) if plain and value.is_floating_point() else value


@contextmanager
def _launcher_environment(given: ScriptRank) -> Iterator[None]:
    """Set, inside the block, the environment variables that a launcher sets for the rank of ``given``."""
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
