"""The micro-batches of a step as virtual ranks, whose bits do not depend on how many ranks compute them."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from zero_config import Config
from zero_partition import Partition

from .errors import UsageError

_KEY = "deterministic.across_world_sizes"


class MicroBatches(Protocol):
    """The questions that an engine asks about the micro-batches of a step; ``micro`` is this rank's number of one, from
    0."""

    def to_backpropagate(self, loss: torch.Tensor, steps: int, *, divide: bool) -> torch.Tensor:
        """Return what to call backward on; ``divide``: the gradient is the mean over the ``steps`` micro-batches."""

    def forward(self, step: int, micro: int) -> AbstractContextManager[None]:
        """A context around a forward pass."""

    def before_backward(self, step: int, micro: int) -> None:
        """Refuse a backward pass that would not count as the rest of the step does."""

    def before_step(self, micro: int, *, boundary: bool) -> None:
        """Refuse a step whose micro-batches are not all there."""

    def before(self, call: str, micro: int) -> None:
        """Refuse a ``call`` in the middle of a step."""

    def no_plain_backward(self) -> str | None:
        """Why ``loss.backward()`` cannot be counted; None when it can."""

    def state_dict(self) -> dict[str, int] | None:
        """Return what a run that resumes has to agree with, as plain data."""

    def mismatch(self, saved: Mapping[str, int] | None) -> str | None:
        """Why this run cannot go on bitwise from what `state_dict` returned in another; None when it can."""

    def load_state_dict(self, saved: Mapping[str, int] | None) -> None:
        """Go on with the random numbers of the run that saved."""


class OrdinaryMicroBatches:
    """Micro-batches belong to their rank: gradients add up, and everything is allowed."""

    def to_backpropagate(self, loss: torch.Tensor, steps: int, *, divide: bool) -> torch.Tensor:
        """The loss, divided by the accumulation steps."""
        return loss / steps if divide else loss

    def forward(self, step: int, micro: int) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def before_backward(self, step: int, micro: int) -> None:
        """Nothing is refused."""

    def before_step(self, micro: int, *, boundary: bool) -> None:
        """Nothing is refused."""

    def before(self, call: str, micro: int) -> None:
        """Nothing is refused."""

    def no_plain_backward(self) -> str | None:
        """It can."""
        return None

    def state_dict(self) -> dict[str, int] | None:
        """Nothing."""
        return None

    def mismatch(self, saved: Mapping[str, int] | None) -> str | None:
        """It can."""
        return None

    def load_state_dict(self, saved: Mapping[str, int] | None) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class _Buffer:
    """A persistent buffer: its name, and where it is."""

    name: str
    module: nn.Module
    key: str

    def version(self) -> tuple[int, int]:
        """Changes whenever the buffer is written or replaced."""
        buffer = self.module._buffers.get(self.key)  # user code may have removed it
        return (id(buffer), -1 if buffer is None else buffer._version)


class VirtualRanks:
    """Every micro-batch of a step is a virtual rank (see [Note: virtual ranks] in `zero_partition.leaves`).

    Refuses by name what would make bits depend on the number of ranks: losses that are divided by it, several backward
    passes for one micro-batch, buffers that forward writes, other numbers of threads. Random numbers of a forward pass
    are drawn from generators (Python's, NumPy's, torch's) that are seeded for each virtual rank and step. Collective.

    ``seed``: of these; None takes rank 0's `torch.initial_seed`.
    """

    def __init__(self, count: int, seed: int | None, partition: Partition, module: nn.Module) -> None:
        if dist.get_world_size() != partition.data_world_size:
            raise UsageError(f"{_KEY}: expected no mpu, got one: ranks that share a layer add up in their own order")
        self._partition = partition
        self._count = count
        self._steps = count // partition.data_world_size
        self._threads = torch.get_num_threads()
        self._seeded: tuple[int, int] | None = None
        self._buffers = _persistent_buffers(module)
        mine = [self._threads, torch.initial_seed() if seed is None else seed]
        answers = partition.runtime.agree("virtual ranks", "", mine)
        for rank, (threads, _) in enumerate(answers):
            if threads != answers[0][0]:
                raise UsageError(
                    f"{_KEY}: expected as many torch threads on every rank, got {answers[0][0]} on rank 0 and "
                    f"{threads} on rank {rank}: sums over threads are rounded differently. Set OMP_NUM_THREADS alike"
                )
        self._seed = int(answers[0][1])

    def to_backpropagate(self, loss: torch.Tensor, steps: int, *, divide: bool) -> torch.Tensor:
        """The loss itself: the mean over the virtual ranks is taken of the gradients' sum; times ``steps`` for a loss
        that is not to be divided."""
        return loss if divide else loss * steps

    @contextmanager
    def forward(self, step: int, micro: int) -> Iterator[None]:
        """Seed the generators for this virtual rank's first forward pass; refuse buffers that the pass writes."""
        if torch.is_grad_enabled() and self._seeded != (step, micro):
            self._seeded = (step, micro)
            self._seed_generators(step, micro * self._partition.data_world_size + self._partition.data_rank)
        before = [buffer.version() for buffer in self._buffers]
        yield
        for buffer, version in zip(self._buffers, before, strict=True):
            if buffer.version() != version:
                raise UsageError(
                    f"{_KEY}: forward wrote the buffer '{buffer.name}', so it depends on which micro-batches this rank "
                    "computes, and in which order. Use a layer without running statistics (LayerNorm, GroupNorm), put "
                    "this one into eval mode, or register the buffer with persistent=False if it is a cache"
                )

    def before_backward(self, step: int, micro: int) -> None:
        """One backward pass for each forward pass through the engine, in order."""
        if self._seeded != (step, micro):
            raise UsageError(
                f"{_KEY}: backward without a forward pass through the engine for this micro-batch. Call engine(batch), "
                "not engine.module(batch), and engine.step() after each backward"
            )
        added = self._added()
        if added != micro:
            raise UsageError(
                f"{_KEY}: expected one backward pass for each micro-batch, but this is micro-batch {micro} of the "
                f"step on this rank and {added} backward passes went before. Add the losses up and call "
                "engine.backward once, then engine.step(); call zero_grad() only between steps"
            )

    def before_step(self, micro: int, *, boundary: bool) -> None:
        """A step has one micro-batch for each virtual rank."""
        if boundary != (micro + 1 == self._steps):
            raise UsageError(
                f"{_KEY}: expected a step after {self._steps} micro-batches on each of "
                f"{self._partition.data_world_size} ranks, got {'one' if boundary else 'none'} after {micro + 1}; "
                "do not set the boundary yourself"
            )
        if boundary and self._added() not in (0, self._steps):
            raise UsageError(
                f"{_KEY}: expected the gradients of {self._steps} micro-batches, got {self._added()}. Call backward "
                "once for each, and zero_grad() only between steps"
            )

    def before(self, call: str, micro: int) -> None:
        """Between steps there are no sums under way."""
        if self._added() not in (0, self._steps):
            raise UsageError(
                f"{_KEY}: expected {call} between steps, got it after {micro} of the {self._steps} micro-batches of one"
            )

    def no_plain_backward(self) -> str | None:
        """The engine has to know whether the loss is divided."""
        return f"{_KEY}: loss.backward() may be divided by a number of ranks or not; call engine.backward(loss)"

    def state_dict(self) -> dict[str, int] | None:
        """Virtual ranks, their seed, and threads per rank."""
        return {"count": self._count, "seed": self._seed, "threads": self._threads}

    def mismatch(self, saved: Mapping[str, int] | None) -> str | None:
        """Another number of virtual ranks or threads gives other bits."""
        if saved is None:
            return None
        for name, mine in (("count", self._count), ("threads", self._threads)):
            if saved[name] != mine:
                what = "virtual ranks" if name == "count" else "torch threads per rank"
                return f"it was saved with {saved[name]} {what}, and here are {mine}"
        return None

    def load_state_dict(self, saved: Mapping[str, int] | None) -> None:
        """Go on with the random numbers of the run that saved."""
        if saved is not None:
            self._seed = saved["seed"]

    def _added(self) -> int:
        """Micro-batches of this step in the sums so far; the same on every rank."""
        found = (g.leaves.added for g in self._partition.runtime.gradients.values() if g.leaves is not None)
        return next(found, 0)

    def _seed_generators(self, step: int, virtual_rank: int) -> None:
        text = f"{self._seed}/{step}/{virtual_rank}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback for every kind of device
        if self._partition.device.type != "cpu":
            torch.get_device_module(self._partition.device).manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def micro_batches(config: Config, partition: Partition, module: nn.Module) -> MicroBatches:
    """How the micro-batches of a step count, as ``config`` says. Collective where they are virtual ranks."""
    if not config.virtual_ranks:
        return OrdinaryMicroBatches()
    return VirtualRanks(config.virtual_ranks, getattr(config.deterministic, "seed", None), partition, module)


def _persistent_buffers(module: nn.Module) -> list[_Buffer]:
    return [
        _Buffer(f"{name}.{key}" if name else key, owner, key)
        for name, owner in module.named_modules()
        for key in owner._buffers
        if key not in owner._non_persistent_buffers_set
    ]
