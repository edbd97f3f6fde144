"""`engine.optimizer` by DeepSpeed's names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_core.engine import Engine
from zero_core.errors import UsageError
from zero_partition import Partition, ShardedOptimizer, Unit
from zero_precision import DynamicLossScale, LossScale
from zero_settings import Config

from . import VERSION

_STATE_KEYS = {
    False: ("base_optimizer_state", "single_partition_of_fp32_groups"),
    True: ("optimizer_state_dict", "fp32_flat_groups"),
}


class DeepSpeedOptimizer:
    """The base class of all that `engine.optimizer` can be."""


class LossScaler:
    """A loss scale by DeepSpeed's names, with the values that it has when they are read.

    ``loss_scale``: the engine's own. ``config``: the engine's, which has the window and the minimum.
    """

    scale_factor = 2.0

    def __init__(self, loss_scale: LossScale, config: Config) -> None:
        self._loss_scale = loss_scale
        self.scale_window = config.fp16.loss_scale_window
        self.min_scale = config.fp16.min_loss_scale

    @property
    def cur_scale(self) -> float:
        """Return the factor by which losses are multiplied before the backward pass."""
        return self._loss_scale.scale

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Return whether the scale is dynamic."""
        return isinstance(self._loss_scale, DynamicLossScale)

    dynamic_loss_scale = dynamic

    @property
    def cur_iter(self) -> int:
        """Return the number of steps that a dynamic scale has seen, skipped ones included; 0 for others."""
        return int(self._loss_scale.state_dict().get("calls", 0))

    @property
    def last_overflow_iter(self) -> int:
        """Return the number, from 0, of the last step that was skipped; -1 before any, and for other scales."""
        return int(self._loss_scale.state_dict().get("last_overflow", -1))


class ZeROOptimizer(DeepSpeedOptimizer):
    """The torch optimizer of an engine, with attributes and methods of DeepSpeed's ZeRO optimizers.

    ``sharded``: the engine's optimizer, which holds the torch optimizer. ``parameter_offload``: what becomes the
    attribute of that name, at stage 3; None for no such attribute. ``param_groups``, ``state`` and ``defaults`` are the
    torch optimizer's own objects. The object keeps only a weak reference to ``engine``: once the engine is gone, most
    attributes and methods raise `UsageError`.
    """

    def __init__(self, engine: Engine, sharded: ShardedOptimizer, parameter_offload: DeepSpeedOptimizer | None) -> None:
        self._reference = weakref.ref(engine)
        self._sharded = sharded
        if parameter_offload is not None:
            self.parameter_offload = parameter_offload

    @property
    def optimizer(self) -> Optimizer:
        """Return the torch optimizer."""
        return self._sharded.inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the torch optimizer's param groups; changes to them take effect at the next step."""
        return self._sharded.param_groups

    @property
    def state(self) -> Any:
        """Return the torch optimizer's own state: by the fragment of a parameter that this rank updates, name ->
        value."""
        return self._sharded.state

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the torch optimizer's default options, its own dict."""
        return self._sharded.inner.defaults

    @property
    def overflow(self) -> bool:
        """Return whether the last step was skipped because a gradient was not finite; False before the first. May wait
        for the device.
        """
        return self._engine.get_global_grad_norm() is not None and not self._engine.was_step_applied()

    @property
    def loss_scale(self) -> float:
        """Return the factor by which losses are multiplied before the backward pass."""
        return self._engine.loss_scale()

    cur_scale = loss_scale

    @property
    def loss_scaler(self) -> LossScaler:
        """Return the loss scale, with its counters, as an object with DeepSpeed's names."""
        return LossScaler(self._sharded.loss_scale, self._engine.resolved_config)

    loss_scale_config = loss_scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        return isinstance(self._sharded.loss_scale, DynamicLossScale)

    def needs_scaler(self) -> bool:
        """Return whether losses have to be scaled before a backward pass of the script's own, by `engine.scale`."""
        return self.loss_scale != 1.0 or self.dynamic_loss_scale

    @property
    def clip_grad(self) -> float:
        """Return the maximal global gradient norm of clipping; 0 without clipping."""
        return self._sharded.clip

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """Return this rank's masters, 1-D, unit by unit: a unit's flat master itself if that is on the device, else
        copies of its parameters' fragments of the master from the tier that holds them."""
        partition = self._engine.partition
        return [tensor for unit in partition.units for tensor in _masters_of(partition, unit)]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state by DeepSpeed's names: the torch optimizer's state dict, the masters (see
        `fp32_partitioned_groups_flat`), the stage, the number of ranks, the version and facts about the last step.

        The keys of the first two are those of DeepSpeed's optimizer of the stage. `engine.save_checkpoint` saves the
        state of all ranks.
        """
        stage = self._engine.zero_optimization_stage()
        inner, masters = _STATE_KEYS[stage == 3]
        return {
            "zero_stage": stage,
            "partition_count": self._engine.partition.data_world_size,
            "ds_version": VERSION,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "clip_grad": self.clip_grad,
            inner: self._sharded.inner.state_dict(),
            masters: self.fp32_partitioned_groups_flat,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], **_options: Any) -> None:
        """Load the torch optimizer's state from what `state_dict` returned on this rank; masters and weights stay.

        ``state_dict`` must come from the same number of ranks, and from stage 3 if and only if this is stage 3, else
        `UsageError`. ``options`` have no effect.
        """
        key = _STATE_KEYS[self._engine.zero_optimization_stage() == 3][0]
        if key not in state_dict:
            raise UsageError(
                f"engine.optimizer.load_state_dict: expected {key!r} as this rank's state_dict() has it, got "
                f"{sorted(state_dict)}; engine.load_checkpoint loads at any number of ranks and stage"
            )
        self._sharded.inner.load_state_dict(state_dict[key])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated so far, by `Engine.zero_grad`, which gets ``set_to_none`` (`engine.step` drops
        them itself).
        """
        self._engine.zero_grad(set_to_none)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, **_options: Any) -> None:
        """Call `engine.backward` without dividing the loss by the accumulation steps; ``options`` have no effect.
        Collective where `Engine.backward` is.
        """
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Call `engine.step` without its learning rate schedule. Collective at the accumulation boundary. Raises
        `UsageError` for a ``closure``.
        """
        if closure is not None:
            raise UsageError("engine.optimizer.step(closure=…): call the closure yourself, then step()")
        self._engine.step_without_schedule()

    def get_full_hp_param(self, parameter: nn.Parameter, optim_state_key: str | None = None) -> torch.Tensor:
        """Return a full copy of a parameter's master, or of its state ``optim_state_key``. Collective."""
        if optim_state_key is None:
            return self._engine.full_param(parameter)
        return self._engine.full_state(parameter, optim_state_key)

    @property
    def _engine(self) -> Engine:
        """Return the engine, or raise `UsageError` if it no longer exists."""
        engine = self._reference()
        if engine is None:
            raise UsageError("engine.optimizer outlived its engine; keep a reference to the engine")
        return engine

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sharded.inner!r})"


def _masters_of(partition: Partition, unit: Unit) -> list[torch.Tensor]:
    """Return this rank's masters of ``unit``, 1-D: the flat one itself if it is on the device, else copies of those of
    its parameters' fragments from the tier's store; empty if there are none.
    """
    if unit.master is not None:
        return [unit.master]
    if unit.states is None:
        return []
    names = [f.entry.name for f in unit.layout.fragments(partition.rank) if "master" in unit.states.kinds(f.entry.name)]
    return [kept["master"] for _, kept in unit.states.states(names)]
