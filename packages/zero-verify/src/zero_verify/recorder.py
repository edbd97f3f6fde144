"""Record what each engine of the script computes in every step; runs in the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ckpt import Interval, SoloCoordinator, save_sharded
from zero_ckpt.torch import DistCoordinator, Stager, tensor_buffer
from zero_core.engine import Engine
from zero_core.supervision import Unsupervised
from zero_core.training import Observer, Unobserved
from zero_partition import StepResult, UnitLimits
from zero_precision import cast_floating, parse_dtype
from zero_settings import Config

from .recording import GRADIENT, WEIGHT, engine_folder, step_tag
from .variants import Variant, variant_config


class AllStepsTaken(BaseException):
    """Raised in the script once each of its engines has taken the requested steps."""


class Recorder(Unsupervised):
    """Records the engines of a training script and stops the script once each has taken ``steps`` steps. The
    `zero_core.supervision.Supervisor` of that script: `initialize` calls its methods.

    ``folder``: of the recording. ``variant``: which configuration the engines get, made from ``config``, the user's;
    None: from what the script gives to `initialize`. Engines that only infer are not recorded. The script ends by
    `AllStepsTaken`, raised inside it."""

    def __init__(self, folder: Path, variant: Variant, steps: int, config: Any = None) -> None:
        self.steps = steps
        self._folder = folder
        self._variant = variant
        self._config = config
        self._threshold = 0
        self._engines: list[Engine] = []
        self._recorders: list[EngineRecorder] = []

    def config(self, given: Any, world_size: int) -> Any:
        """Return the configuration for an engine, that of the variant, from the user's or from ``given``, the script's.
        Keep the user's persistence threshold for `limits`. Raises `ConfigError`."""
        source = given if self._config is None else self._config
        zero = Config.load(source, world_size=world_size).zero_optimization
        self._threshold = zero.stage3_param_persistence_threshold if zero.stage >= 3 else 0
        return variant_config(source, self._variant, world_size)

    def limits(self, limits: UnitLimits) -> UnitLimits:
        """Return ``limits`` with the persistence threshold that `config` kept from the user's configuration (0 below
        stage 3). All variants then divide the model into the same units, whose order norms are summed in."""
        return replace(limits, persistence_threshold=self._threshold)

    def observer(self, engine: Engine) -> Observer:
        """Return an `EngineRecorder` for ``engine`` if it trains, else an observer that does nothing. Keep the engine
        for `close`. In the variant in float32, add a hook to ``engine`` that casts floating-point inputs."""
        if self._variant is Variant.FLOAT32:
            engine.register_forward_pre_hook(_inputs_in_float32, with_kwargs=True)
        self._engines.append(engine)
        if engine.optimizer is None:
            return Unobserved()
        place = engine.model_part.place
        part = place.rank if place.size > 1 else None
        folder = engine_folder(self._folder, len(self._recorders), part)
        self._recorders.append(EngineRecorder(engine, folder, self._end_when_done))
        return self._recorders[-1]

    def close(self) -> None:
        """Destroy the engines, because the threads of their process groups would outlive the interpreter.
        Collective."""
        for engine in self._engines:
            engine.destroy(unshard=False)

    def _end_when_done(self) -> None:
        """Raise `AllStepsTaken` if every recorded engine has taken the requested steps; otherwise do nothing."""
        if all(recorder.steps_taken >= self.steps for recorder in self._recorders):
            raise AllStepsTaken


class EngineRecorder:
    """An `Observer` that writes one checkpoint per step of ``engine`` below ``folder``: full gradients and weights, and
    each rank's losses and digests of the weights that forward read.

    Every rank has one, as `before_step` and `after_step` are collective. ``on_step``: called after each step. Hooks on
    the engine's modules, which stay there, note the weights that forward reads."""

    def __init__(self, engine: Engine, folder: Path, on_step: Callable[[], None]) -> None:
        self.steps_taken = 0
        self._engine = engine
        self._folder = folder
        self._on_step = on_step
        self._names = {id(p): name for name, p in engine.module.named_parameters() if engine.partition.find(p)}
        self._trained = [p for p in engine.module.parameters() if id(p) in self._names and p.requires_grad]
        self._losses: list[float] = []
        self._reads: list[list[str]] = []
        self._gradients: list[Interval] = []
        autocast = engine.resolved_config.torch_autocast
        self._read_dtype = parse_dtype(autocast.dtype or "bf16") if autocast.enabled else None
        for module in engine.module.modules():
            if any(id(p) in self._names for p in module._parameters.values()):
                module.register_forward_pre_hook(self._on_read)

    def loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch to those that the step's checkpoint will hold. Waits for the device."""
        self._losses.append(float(loss.detach()))

    def before_step(self) -> None:
        """Copy the full averaged gradients, divided by the loss scale, to the host memory of rank 0, for the checkpoint
        that `after_step` writes. Collective."""
        self._gradients = list(self._full_values(GRADIENT, self._gradient))

    def after_step(self, result: StepResult) -> None:
        """Write the step's checkpoint, clear the values kept for it, and call ``on_step``, which may end the script.
        Collective: gathers every weight, and waits for all ranks. Raises `zero_ckpt.CheckpointError` if the checkpoint
        cannot be written."""
        weights = list(self._full_values(WEIGHT, self._engine.full_param))
        group = self._engine.partition.groups.control.process_group
        save_sharded(
            self._folder,
            step_tag(self.steps_taken),
            [*self._gradients, *weights],
            step=self.steps_taken,
            config=self._engine.resolved_config.to_plain(),
            client_state={
                "norm": result.norm,
                "taken": result.taken,
                "names": [self._names[id(p)] for p in self._trained],
            },
            rank_state={"losses": self._losses, "reads": self._reads},
            coordinator=SoloCoordinator() if group is None else DistCoordinator(group),
            save_latest=False,
        )
        self._losses, self._reads, self._gradients = [], [], []
        self.steps_taken += 1
        self._on_step()

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the full averaged gradient of a parameter, divided by the loss scale; None if no rank has one.
        Collective."""
        full = self._engine.full_grad(parameter)
        return None if full is None else full.div_(self._engine.loss_scale())

    def _full_values(self, kind: str, read: Callable[[nn.Parameter], torch.Tensor | None]) -> Iterator[Interval]:
        """Gather the full value ``read(parameter)`` of each trained parameter, and yield it on rank 0, copied to the
        host, as checkpoint intervals of ``kind`` ("gradient" or "weight"). Parameters whose value is None are left out.
        Collective."""
        for parameter in self._trained:
            full = read(parameter)
            if full is not None and self._engine.partition.data_rank == 0:
                yield from Stager().intervals(self._names[id(parameter)], kind, full.cpu().contiguous())

    def _on_read(self, module: nn.Module, _args: Any) -> None:
        """Record digests of the weights of ``module`` before its forward reads them. Does nothing in compiled regions
        and where gradients are disabled. A forward pre-hook."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in self._names:
                value = parameter.detach()
                self._reads.append([self._names[id(parameter)], _digest(value, self._read_dtype)])


def _digest(value: torch.Tensor, dtype: torch.dtype | None) -> str:
    """Return a hexadecimal digest of the bytes of ``value``, after casting it to ``dtype`` unless that is None."""
    flat = value.to(device="cpu", dtype=dtype or value.dtype, copy=True).reshape(-1).view(torch.uint8)
    return hashlib.blake2b(tensor_buffer(flat), digest_size=8).hexdigest()


def _inputs_in_float32(_engine: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return (args, kwargs), the engine's arguments, with all floating-point tensors cast to float32. A forward
    pre-hook of the engine."""
    return cast_floating((args, kwargs), torch.float32)
