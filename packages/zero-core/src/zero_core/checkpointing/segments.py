"""`Checkpointing`: runs segments through torch's own recomputation and stores their inputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero_offload import offload_activations
from zero_settings import ActivationCheckpointing

from .activation_stores import ActivationStore, ContiguousStore, PartitionedStore, PlainStore

logger = logging.getLogger("zero_core")

_RUNNING: ContextVar[Checkpointing | None] = ContextVar("zero_core_checkpointing", default=None)


@dataclass
class Profile:
    """The cost of segments since the last step: the number run forward, the number run again, and the seconds of
    each."""

    segments: int = 0
    forward: float = 0.0
    recomputed: int = 0
    recomputation: float = 0.0

    def __str__(self) -> str:
        """Return both numbers and both times as text for the log."""
        return (
            f"{self.segments} segments in {self.forward:.3f} s forward, "
            f"{self.recomputed} recomputed in {self.recomputation:.3f} s"
        )


class Checkpointing:
    """Recomputes segments in backward and stores their inputs as ``section`` says.

    - ``partition_activations``: inputs are sharded over ``group`` and gathered in backward. They must be equal on its
      ranks, as in tensor parallelism. Without a group nothing is sharded.
    - ``cpu_checkpointing``: inputs are stored in host memory (`zero_offload.offload_activations`).
    - ``contiguous_memory_optimization``: inputs of one size are stored in one buffer with room for
      ``number_checkpoints`` segments. No effect with ``cpu_checkpointing``, which reuses host memory by size.
    - ``synchronize_checkpoint_boundary``: wait for the accelerator at both ends of every segment.
    - ``profile``: measure segments in `profile`, which also waits for the accelerator."""

    def __init__(self, section: ActivationCheckpointing | None = None, group: dist.ProcessGroup | None = None) -> None:
        self.section = section if section is not None else ActivationCheckpointing()
        self.profile = Profile()
        self._offload = offload_activations(lambda _tensor: False) if self.section.cpu_checkpointing else None
        self._store: ActivationStore = PlainStore()
        if self.section.contiguous_memory_optimization and self._offload is None:
            self._store = ContiguousStore(self.section.number_checkpoints or 0)
        if self.section.partition_activations and group is not None:
            self._store = PartitionedStore(group, self._store)
        elif self.section.partition_activations:
            logger.warning(
                "activation_checkpointing.partition_activations is on, but there is no model-parallel group (mpu): "
                "every rank keeps full activations"
            )

    def checkpoint(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
        """Return ``function(*args, **kwargs)`` without storing what autograd saves in it: backward runs the function
        again. ``use_reentrant``: torch's older variant, which needs an input that requires gradients and takes no
        keywords."""
        segment = _Segment(self, function)
        with self.storing_inputs():
            return torch_checkpoint(segment, *args, use_reentrant=use_reentrant, **kwargs)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the functions of this package use this object inside the block, unless `configure` was called."""
        token = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(token)

    def after_step(self, *, reports: bool) -> None:
        """With ``profile``, log the cost of segments since the last step if this rank ``reports``, and start counting
        again."""
        if self.section.profile and self.profile.segments:
            if reports:
                logger.info("activation checkpointing: %s", self.profile)
            self.profile = Profile()

    def reset(self) -> None:
        """Free the contiguous buffers; inputs that still wait for backward keep theirs alive."""
        self._store.reset()

    @contextmanager
    def storing_inputs(self) -> Iterator[None]:
        """Store what autograd saves inside the block as ``section`` says; under torch's checkpoint that is a segment's
        inputs."""
        if isinstance(self._store, PlainStore) and self._offload is None:
            yield
            return
        outer = _saved_tensors_hooks()
        with ExitStack() as stack:
            if self._offload is not None:
                stack.enter_context(self._offload)
            inputs = _Inputs(self._store, outer, _saved_tensors_hooks() if self._offload is not None else None)
            stack.enter_context(saved_tensors_hooks(inputs.pack, lambda packed: packed()))
            yield

    def _synchronizes(self) -> bool:
        """Return whether segments wait for the accelerator at both ends."""
        return self.section.synchronize_checkpoint_boundary or self.section.profile


def running() -> Checkpointing | None:
    """Return the `Checkpointing` in whose `running` block, or segment, this code runs; None outside."""
    return _RUNNING.get()


class _Segment:
    """The function of one segment, which torch calls once in forward and again in backward. ``owner``: runs the
    segment."""

    def __init__(self, owner: Checkpointing, function: Callable[..., Any]) -> None:
        self._owner = owner
        self._function = function
        self._ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function and return its result. Time the run if segments wait for the accelerator. Any thread may
        call it."""
        again, self._ran = self._ran, True
        with self._owner.running():  # backward may come on a thread of autograd's, whose context is empty
            if not self._owner._synchronizes():
                return self._function(*args, **kwargs)
            _synchronize()
            start = time.perf_counter()
            try:
                return self._function(*args, **kwargs)
            finally:  # torch ends a recomputation by an exception when it has what it needs
                _synchronize()
                self._count(time.perf_counter() - start, again)

    def _count(self, seconds: float, again: bool) -> None:
        """Add a run of ``seconds`` to the owner's profile; ``again``: a recomputation in backward."""
        profile = self._owner.profile
        if again:
            profile.recomputed, profile.recomputation = profile.recomputed + 1, profile.recomputation + seconds
        else:
            profile.segments, profile.forward = profile.segments + 1, profile.forward + seconds


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class _Inputs:
    """The saved-tensor hook that stores one segment's inputs. ``outer``: the hooks that were active outside, which pack
    each tensor first. If they return another object, that is kept (views of sharded parameters, or all under
    save_on_cpu), unless its attribute ``stays`` says that it only holds the tensor. Other tensors go to ``store``, and
    what is stored goes to ``offload``, if not None."""

    def __init__(self, store: ActivationStore, outer: Hooks | None, offload: Hooks | None) -> None:
        self._store = store
        self._outer = outer
        self._offload = offload
        self._position = 0

    def pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Store one input of the segment; return a function without arguments that restores the input in backward."""
        if not tensor.numel():  # torch before 2.12 saves one of its own beside the inputs
            empty = tensor.detach()
            return lambda: empty
        if self._outer is not None:
            pack, unpack = self._outer
            packed = pack(tensor)
            if packed is not tensor and not getattr(packed, "stays", False):
                return lambda: unpack(packed)
        self._position += 1
        part, restore = self._store.keep(tensor.detach(), self._position)
        if self._offload is None:
            return lambda: restore(part)
        move, bring = self._offload
        moved = move(part)
        return lambda: restore(bring(moved))


def _saved_tensors_hooks() -> Hooks | None:
    """Return the innermost saved-tensor hooks that are active; None if there are none."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _synchronize() -> None:
    """Wait until the current accelerator, if there is one, has finished its work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
