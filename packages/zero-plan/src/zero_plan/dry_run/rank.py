"""The dry run of one rank: the engine, the user's model and a few steps."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_map

import zero_core
from zero_core.engine import Engine
from zero_core.recording import RECORD_VARIABLE
from zero_core.supervision import Supervisor, supervised
from zero_offload.ends import tier_ends
from zero_optim_kernels import dry_run_kernels

from ..errors import PlanError
from ..planned import RankPlan
from .fakes import PlanMode
from .lines import describe_error, naming_the_line
from .parts import SavedPart
from .peak_watch import PeakWatch
from .recorder import DryRunRecorder
from .saving import plan_save
from .supervising import DryRunSupervisor
from .world import fake_world

STEPS = 3  # the first learns which units a pass uses, the second in which order gradients come


@contextmanager
def dry_run_context(by: Supervisor, rank: int, world_size: int, recorder: DryRunRecorder) -> Iterator[None]:
    """Inside the block, run engines as rank ``rank`` of a world without memory, files and other ranks, supervised by
    ``by`` and measured by ``recorder``. Raises `PlanError` if the environment asks for a run record or
    torch.distributed is initialised.
    """
    if os.environ.get(RECORD_VARIABLE):
        raise PlanError(f"{RECORD_VARIABLE} is set, and a dry run must not write into a run's record: unset it")
    with fake_world(rank, world_size), dry_run_kernels(), supervised(by), tier_ends(recorder.ends), _without_warnings():
        with recorder.watch:
            yield


class DryRun(NamedTuple):
    """The run to plan. ``loss``: returns the loss of the model's output; the others are those of `zero_plan.plan`."""

    model_fn: Callable[[], nn.Module]
    config: Any
    batch: Any
    loss: Callable[[Any], torch.Tensor]


def plan_rank(
    run: DryRun, rank: int, world_size: int, *, steps: int = STEPS, checkpoint: bool = False
) -> tuple[RankPlan, SavedPart | None]:
    """Train for ``steps`` steps as rank ``rank`` of ``world_size`` without memory. Return (plan, part): the rank's
    plan, with the traffic and operations of the last step, and what the rank saved (None without ``checkpoint``).

    ``checkpoint``: plan a save after the steps too. Raises `PlanError` for a run that cannot be planned.
    """
    recorder, part = DryRunRecorder(), None
    with new_engine(run, rank, world_size, recorder) as (engine, folder):
        micro_batch = tree_map(without_values, run.batch)
        for _ in range(steps):
            recorder.begin_step(engine)
            _run_step(engine, micro_batch, run.loss, recorder.watch)
        found = recorder.plan(engine)
        if checkpoint:
            saved, part = plan_save(engine, recorder.watch, folder)
            found = replace(found, saved=saved)
    return found, part


@contextmanager
def new_engine(run: DryRun, rank: int, world_size: int, recorder: DryRunRecorder) -> Iterator[tuple[Engine, Path]]:
    """Yield (engine, folder): an engine without memory as rank ``rank`` of ``world_size``, whose memory ``recorder``
    watches, and a temporary folder on the file system of the tiers' files.

    The engine is destroyed after the block, unless the block raises. Raises `PlanError` for a configuration without an
    optimizer, and for a ``run.model_fn`` that builds no model.
    """
    with (
        TemporaryDirectory(prefix="zero-plan-") as folder,
        dry_run_context(DryRunSupervisor(Path(folder)), rank, world_size, recorder),
        PlanMode(recorder.watch.memory, recorder.operations),
    ):
        engine = zero_core.initialize(model=_build_model(run.model_fn), config=run.config)[0]
        if engine.optimizer is None:
            raise PlanError('config: a dry run trains, so the configuration has to name an "optimizer"')
        recorder.watch.follow(engine)
        yield engine, Path(folder)
        engine.destroy(unshard=False)


def _build_model(model_fn: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that ``model_fn`` builds. Raises `PlanError` if it fails, is itself a module, or returns another
    type.
    """
    if isinstance(model_fn, nn.Module):
        raise PlanError(f"model_fn: expected a function that returns a model, got {type(model_fn).__name__}, a model")
    with refuse_real_parameters():
        try:
            model = model_fn()
        except Exception as error:
            raise PlanError(f"model_fn: {describe_error(error, 'it fails')}") from error
    if not isinstance(model, nn.Module):
        raise PlanError(f"model_fn: expected a function that returns a torch.nn.Module, got {model!r}")
    return model


@contextmanager
def refuse_real_parameters() -> Iterator[None]:
    """Inside the block, raise `PlanError` when a parameter with memory, such as one of a file, is given to a module."""
    handle = register_module_parameter_registration_hook(_refuse_values)
    try:
        yield
    finally:
        handle.remove()


def _refuse_values(module: nn.Module, name: str, parameter: object) -> None:
    """Raise `PlanError` if ``parameter`` is a real one, with memory. A parameter registration hook of torch."""
    if isinstance(parameter, nn.Parameter) and not isinstance(parameter, FakeTensor):
        raise PlanError(
            f"the parameter '{name}' of {type(module).__name__} has values, as if they were read from a file: a dry "
            "run builds models from their configuration alone, without weights"
        )


def _run_step(engine: Engine, micro_batch: Any, loss: Callable[[Any], torch.Tensor], watch: PeakWatch) -> None:
    """Run one optimizer step, with ``micro_batch`` (see `zero_plan.plan`) for each of the step's micro-batches; set the
    phase of ``watch`` along the way. ``loss``: returns the loss of the model's output. Raises `PlanError` for errors of
    the model and of ``loss``, naming the line.
    """
    for _ in range(engine.gradient_accumulation_steps()):
        watch.phase = "forward"
        with naming_the_line("the model's forward"):
            if isinstance(micro_batch, Mapping):
                output = engine(**micro_batch)
            else:
                output = engine(*micro_batch) if isinstance(micro_batch, tuple) else engine(micro_batch)
        with naming_the_line("loss"):
            found = loss(output)
        watch.phase = "backward"
        with naming_the_line("the backward pass"):
            engine.backward(found)
        watch.phase = "step"
        engine.step()


def without_values(value: Any) -> Any:
    """Return an empty CPU tensor with the size, strides and dtype of the tensor ``value``, a fake one inside a
    `PlanMode`; any other value unchanged.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence inside the block torch's warning about addresses of fake tensors, which kernels ask for (the dry run's
    kernels read nothing there), and its log of operations that fail, of which a `PlanError` tells.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        log.disabled = before
