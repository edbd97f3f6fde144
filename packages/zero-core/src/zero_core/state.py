"""The state that the parts of one engine share; each part gets it in its constructor."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_comm import EngineGroups, Ledger
from zero_optim import Scheduler
from zero_partition import Partition, ShardedOptimizer, StepResult
from zero_precision import PrecisionPolicy, parse_dtype
from zero_settings import Config

from .data_loader import RankLoader
from .errors import UsageError
from .model_parallel import ModelPart
from .virtual_ranks import MicroBatches


@dataclass
class Counters:
    """Counters of steps, micro-batches and samples since the start of training.

    Attributes:
        global_steps: optimizer steps, both taken and skipped.
        micro_steps: micro-batches of this rank that `Engine.step` has counted.
        skipped_steps: optimizer steps that did not update the weights.
        global_samples: samples on all ranks, those of a sequence counted once.
        accumulated: micro-batches counted since the last optimizer step.
        last: the result of the last optimizer step; None before the first.
        last_taken: the result of the last step that updated the weights; None before the first."""

    global_steps: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0
    global_samples: int = 0
    accumulated: int = 0
    last: StepResult | None = None
    last_taken: StepResult | None = None

    @property
    def norm(self) -> float | None:
        """Return the last step's global gradient norm before clipping; None before a step. May wait for the device."""
        return None if self.last is None else self.last.norm


class BatchSizes:
    """The samples and micro-batches that make up a step.

    Attributes:
        train: samples per optimizer step over all ranks.
        micro: samples per micro-batch and rank.
        steps: micro-batches per optimizer step.
        ranks: number of ranks that have samples of their own; those that share a sequence count as one."""

    def __init__(self, config: Config) -> None:
        self.train = config.train_batch_size
        self.micro = config.train_micro_batch_size_per_gpu
        self.steps = config.gradient_accumulation_steps
        self.ranks, self._virtual_ranks = config.data_parallel_size, config.virtual_ranks

    def set_train(self, size: int) -> None:
        """Set ``train`` to ``size`` and ``steps`` to the micro-batches that it needs. Raises `UsageError` for a size
        that is no multiple of a micro-batch on each rank or, with virtual ranks, is not one micro-batch for each of
        these."""
        virtual, together = self._virtual_ranks, self.micro * self.ranks
        if virtual and size != self.micro * virtual:
            raise UsageError(
                f"set_train_batch_size: expected {self.micro * virtual}, a micro-batch for each of the {virtual} "
                f"virtual ranks of deterministic.across_world_sizes, got {size}"
            )
        if size < 1 or size % together:
            raise UsageError(
                f"set_train_batch_size: expected a multiple of {together} ({self.micro} samples per micro-batch on "
                f"{self.ranks} ranks), got {size}"
            )
        self.train, self.steps = size, size // together

    def set_micro(self, size: int) -> None:
        """Set ``micro`` to ``size`` and ``train`` to what follows; ``steps`` stays. Raises `UsageError` for a size
        below 1."""
        if size < 1:
            raise UsageError(f"set_train_micro_batch_size: expected a number of samples, got {size}")
        self.train, self.micro = size * self.steps * self.ranks, size


@dataclass
class Attached:
    """The objects that the user may replace while training; None where there is none.

    Attributes:
        scheduler: stepped after each optimizer step that was taken.
        loader: the data loader whose position is part of a checkpoint."""

    scheduler: Scheduler | None = None
    loader: RankLoader[Any] | None = None


@dataclass
class Lifetime:
    """Reasons why an engine cannot be used: it is ``destroyed``; its states are ``parked``, off the device, until
    `Engine.reload_states`; or this is not ``process``, the one that made the engine, but was forked from it."""

    destroyed: bool = False
    parked: bool = False
    process: int = field(default_factory=os.getpid)


@dataclass(frozen=True)
class TrainingState:
    """Everything that one engine trains with; the parts of an engine depend on this, not on the engine.

    Attributes:
        module: the user's model.
        partition: the sharded model: units, process groups and precision.
        optimizer: the sharded optimizer around torch's; None for inference.
        config: the resolved configuration.
        ledger: bytes sent, by phase and unit.
        model_part: the part of the full model that this rank trains, under an mpu.
        micro_batches: the rules for the micro-batches of a step: ordinary ones, or virtual ranks.
        reports: whether this is rank 0 of the job, which prints and logs for all.
        compiled: names of the modules that `Engine.compile` has compiled."""

    module: nn.Module
    partition: Partition
    optimizer: ShardedOptimizer | None
    config: Config
    ledger: Ledger
    model_part: ModelPart
    micro_batches: MicroBatches
    sizes: BatchSizes
    reports: bool
    attached: Attached = field(default_factory=Attached)
    counters: Counters = field(default_factory=Counters)
    lifetime: Lifetime = field(default_factory=Lifetime)
    compiled: list[str] = field(default_factory=list)

    @property
    def groups(self) -> EngineGroups:
        """Return the process groups for gathers, reductions and control messages."""
        return self.partition.groups

    @property
    def precision(self) -> PrecisionPolicy:
        """Return the dtypes of parameters, gradients, messages and states."""
        return self.partition.options.policy

    @property
    def device(self) -> torch.device:
        """Return the device on which the model computes."""
        return self.partition.device

    @property
    def torch_optimizer(self) -> Optimizer | None:
        """Return the torch optimizer whose param groups hold this rank's fragments; None for inference."""
        return None if self.optimizer is None else self.optimizer.inner

    @property
    def sample_rank(self) -> int:
        """Return this rank's number among the ``sizes.ranks`` that have samples of their own."""
        return self.partition.data_rank // self.config.sequence_parallel_size

    @property
    def is_alone(self) -> bool:
        """Return whether a failed step affects this rank only: it is the only rank, and no state is on a tier."""
        parts = self.partition
        return parts.data_world_size == 1 and self.model_part.place.size == 1 and parts.states is None

    def loss_scale(self) -> float:
        """Return the factor by which the loss is multiplied before backward; 1.0 for inference."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale.scale

    def learning_rates(self) -> list[float]:
        """Return each param group's learning rate. Raises `UsageError` without an optimizer, or if the engine is
        closed."""
        return [group["lr"] for group in self.check_trainable("get_lr").param_groups]

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of the forward pass; a null context if `torch_autocast` is off."""
        section = self.config.torch_autocast
        if not section.enabled:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=parse_dtype(section.dtype or "bf16"))

    def check_open(self, call: str) -> None:
        """Raise `UsageError` if the engine is another process's, destroyed or offloaded; ``call``: the engine's, for
        the message."""
        if self.lifetime.process != os.getpid():
            raise UsageError(f"engine.{call}: this process was forked from the engine's; call it there, hand over data")
        if self.lifetime.destroyed:
            raise UsageError(f"engine.{call}: this engine was destroyed; use the plain model, or call initialize again")
        if self.lifetime.parked:
            raise UsageError(f"engine.{call}: the states are offloaded; call engine.reload_states() first")

    def check_trainable(self, call: str) -> ShardedOptimizer:
        """Return the optimizer. Raises `UsageError` if there is none, or if the engine is another process's, destroyed
        or offloaded. ``call``: the engine's, for messages."""
        self.check_open(call)
        if self.optimizer is None:
            raise UsageError(
                f"engine.{call}: this engine has no optimizer; pass optimizer=… to initialize or add an 'optimizer' "
                "section to the config"
            )
        return self.optimizer
