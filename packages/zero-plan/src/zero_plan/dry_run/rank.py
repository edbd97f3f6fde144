"""One rank's run without memory: the engine, the user's model and a few steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from zero_optim_kernels import rehearsed

from ..errors import PlanError
from ..planned import RankPlan
from .books import Books
from .fakes import PlanMode
from .lines import sentence
from .peak_watch import PeakWatch
from .saving import rehearse_save
from .supervising import Rehearsal
from .world import fake_world

STEPS = 3  # the first learns which units a pass uses, the second in which order gradients come


@contextmanager
def dry(by: Supervisor, rank: int, world_size: int, books: Books) -> Iterator[None]:
    """Have everything below the engine be rank ``rank`` of a world without memory, files and other ranks."""
    if os.environ.get(RECORD_VARIABLE):
        raise PlanError(f"{RECORD_VARIABLE} is set, and a dry run must not write into a run's record: unset it")
    with fake_world(rank, world_size), rehearsed(), supervised(by), tier_ends(books.ends), _without_warnings():
        with books.watch:
            yield


def rehearse(
    model_fn: Callable[[], nn.Module],
    config: Any,
    batch: Any,
    loss: Callable[[Any], torch.Tensor],
    rank: int,
    world_size: int,
    *,
    checkpoint: bool = False,
) -> RankPlan:
    """Return what rank ``rank`` of ``world_size`` holds and sends: after a few steps, and in the last of them.

    ``checkpoint``: with what a save after them needs.
    """
    books = Books()
    with TemporaryDirectory(prefix="zero-plan-") as folder, dry(Rehearsal(Path(folder)), rank, world_size, books):
        with PlanMode(books.watch.memory, books.operations):
            model = _built(model_fn)
            engine = zero_core.initialize(model=model, config=config)[0]
            if engine.optimizer is None:
                raise PlanError('config: a dry run trains, so the configuration has to name an "optimizer"')
            micro_batch = tree_map(without_values, batch)
            books.watch.follow(engine)
            for _ in range(STEPS):
                books.begin_step(engine)
                _step(engine, micro_batch, loss, books.watch)
            found = books.plan(engine)
            if checkpoint:
                found = replace(found, saved=rehearse_save(engine, books.watch, Path(folder)))
            engine.destroy(unshard=False)
    return found


def _built(model_fn: Callable[[], nn.Module]) -> nn.Module:
    with only_without_memory():
        try:
            model = model_fn()
        except Exception as error:
            raise PlanError(f"model_fn: {sentence(error, 'it fails')}") from error
    if not isinstance(model, nn.Module):
        raise PlanError(f"model_fn: expected a function that returns a torch.nn.Module, got {model!r}")
    return model


@contextmanager
def only_without_memory() -> Iterator[None]:
    """Refuse parameters that have values, such as those of a file, where they are given to a module."""
    handle = register_module_parameter_registration_hook(_refuse_values)
    try:
        yield
    finally:
        handle.remove()


def _refuse_values(module: nn.Module, name: str, parameter: object) -> None:
    if isinstance(parameter, nn.Parameter) and not isinstance(parameter, FakeTensor):
        raise PlanError(
            f"the parameter '{name}' of {type(module).__name__} has values, as if they were read from a file: a dry "
            "run builds models from their configuration alone, without weights"
        )


def _step(engine: Engine, micro_batch: Any, loss: Callable[[Any], torch.Tensor], watch: PeakWatch) -> None:
    """One step of all its micro-batches."""
    for _ in range(engine.gradient_accumulation_steps()):
        watch.phase = "forward"
        if isinstance(micro_batch, Mapping):
            output = engine(**micro_batch)
        else:
            output = engine(*micro_batch) if isinstance(micro_batch, tuple) else engine(micro_batch)
        found = loss(output)
        watch.phase = "backward"
        engine.backward(found)
        watch.phase = "step"
        engine.step()


def without_values(value: Any) -> Any:
    """A tensor of a batch by its shape alone."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Kernels ask for addresses, which fake tensors do not have; rehearsed ones use none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield
