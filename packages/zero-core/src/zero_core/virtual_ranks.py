"""Rules for the micro-batches of a step: ordinary ones, or virtual ranks. With V virtual ranks a step has V
micro-batches over all ranks, and the same bits at any number of ranks."""

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

from zero_partition import Partition
from zero_partition.shared_storage import overlapping
from zero_settings import Config

from .errors import UsageError

_KEY = "deterministic.across_world_sizes"


class MicroBatches(Protocol):
    """Rules for the micro-batches of a step. ``step``: the number of steps before; ``steps``: this rank's micro-batches
    in it; ``micro``: the index of one of these, from 0. The methods ``check_…`` raise `UsageError` for what they
    refuse."""

    def to_backpropagate(self, loss: torch.Tensor, steps: int, *, divide: bool) -> torch.Tensor:
        """Return a tensor to call backward on, which may be ``loss`` itself, such that the gradients of all ``steps``
        become their mean if ``divide``, else their sum. The caller multiplies by the loss scale."""

    def around_forward(self, step: int, micro: int) -> AbstractContextManager[None]:
        """Return a context for a forward pass of the engine; it may seed generators and check side effects."""

    def check_backward(self, step: int, micro: int) -> None:
        """Refuse the backward pass that is about to run if it does not belong to exactly one micro-batch."""

    def check_step(self, micro: int, *, boundary: bool) -> None:
        """Refuse a ``boundary`` after micro-batch ``micro`` that is not the last of a step, and none after the last."""

    def check_between_steps(self, call: str, micro: int) -> None:
        """Refuse a call of the engine, named ``call``, in the middle of a step: it needs complete gradients or none."""

    def refuse_plain_backward(self) -> str | None:
        """Return, as a message, why ``loss.backward()`` without the engine is refused; None if it is allowed."""

    def state_dict(self) -> dict[str, int] | None:
        """Return the settings that the bits depend on, as plain data for a checkpoint; None if bits are not fixed."""

    def mismatch(self, saved: Mapping[str, int] | None) -> str | None:
        """Return a message if this run cannot continue with the bits of one that saved this `state_dict`; else None."""

    def load_state_dict(self, saved: Mapping[str, int] | None) -> None:
        """Continue with the random numbers of the run that saved this `state_dict`; do nothing for None."""


class OrdinaryMicroBatches:
    """A `MicroBatches` for ordinary gradient accumulation: refuses and saves nothing."""

    def to_backpropagate(self, loss: torch.Tensor, steps: int, *, divide: bool) -> torch.Tensor:
        """Return the loss, divided by the accumulation steps if ``divide``."""
        return loss / steps if divide else loss

    def around_forward(self, step: int, micro: int) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()

    def check_backward(self, step: int, micro: int) -> None: ...
    def check_step(self, micro: int, *, boundary: bool) -> None: ...
    def check_between_steps(self, call: str, micro: int) -> None: ...

    def refuse_plain_backward(self) -> str | None:
        """Return None: plain backward is allowed."""
        return None

    def state_dict(self) -> dict[str, int] | None:
        """Return None: nothing is saved."""
        return None

    def mismatch(self, saved: Mapping[str, int] | None) -> str | None:
        """Return None: no run is refused."""
        return None

    def load_state_dict(self, saved: Mapping[str, int] | None) -> None: ...


@dataclass(frozen=True)
class _Buffer:
    """A persistent buffer of the model: its full name, its module, and its key there."""

    name: str
    module: nn.Module
    key: str

    def version(self) -> tuple[int, int]:
        """Return a value that changes whenever the buffer is written or replaced."""
        buffer = self.module._buffers.get(self.key)  # user code may have removed it
        return (id(buffer), -1 if buffer is None else buffer._version)


class VirtualRanks:
    """A `MicroBatches` for which every micro-batch of a step is a virtual rank ([Note: virtual ranks] in
    `zero_partition.leaves`). Refuses all that would make bits depend on the number of ranks: losses divided by it,
    several backward passes for one micro-batch, buffers that forward writes, different numbers of threads. Seeds the
    generators of Python, NumPy and torch for each virtual rank and step. The constructor is collective.

    ``count``: virtual ranks. ``seed``: of the generators; None takes rank 0's `torch.initial_seed`. In methods,
    ``step``: the number of steps before; ``steps``: this rank's micro-batches in a step; ``micro``: the index of one of
    these."""

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
        """Return the loss if ``divide``, as the summed gradients are divided later; else the loss times ``steps``."""
        return loss if divide else loss * steps

    @contextmanager
    def around_forward(self, step: int, micro: int) -> Iterator[None]:
        """Run a forward pass in the block, after seeding the generators if it is the virtual rank's first with
        gradients. Raises `UsageError` if the pass writes a persistent buffer."""
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

    def check_backward(self, step: int, micro: int) -> None:
        """Raise `UsageError` if the backward pass that is about to run is the second of its micro-batch, or if that had
        no forward pass through the engine."""
        if self._seeded != (step, micro):
            raise UsageError(
                f"{_KEY}: backward without a forward pass through the engine for this micro-batch. Call engine(batch), "
                "not engine.module(batch), and engine.step() after each backward"
            )
        added = self._summed()
        if added != micro:
            raise UsageError(
                f"{_KEY}: expected one backward pass for each micro-batch, but this is micro-batch {micro} of the "
                f"step on this rank and {added} backward passes went before. Add the losses up and call "
                "engine.backward once, then engine.step(); call zero_grad() only between steps"
            )

    def check_step(self, micro: int, *, boundary: bool) -> None:
        """Raise `UsageError` for a ``boundary`` elsewhere than after the last virtual rank, or if some of them have no
        gradients."""
        if boundary != (micro + 1 == self._steps):
            raise UsageError(
                f"{_KEY}: expected a step after {self._steps} micro-batches on each of "
                f"{self._partition.data_world_size} ranks, got {'one' if boundary else 'none'} after {micro + 1}; "
                "do not set the boundary yourself"
            )
        if boundary and self._summed() not in (0, self._steps):
            raise UsageError(
                f"{_KEY}: expected the gradients of {self._steps} micro-batches, got {self._summed()}. Call backward "
                "once for each, and zero_grad() only between steps"
            )

    def check_between_steps(self, call: str, micro: int) -> None:
        """Raise `UsageError`, naming ``call``, while gradients of some, but not all, virtual ranks are summed."""
        if self._summed() not in (0, self._steps):
            raise UsageError(
                f"{_KEY}: expected {call} between steps, got it after {micro} of the {self._steps} micro-batches of one"
            )

    def refuse_plain_backward(self) -> str | None:
        """Return the message that refuses it: the engine has to know whether the loss is divided."""
        return f"{_KEY}: loss.backward() may be divided by a number of ranks or not; call engine.backward(loss)"

    def state_dict(self) -> dict[str, int] | None:
        """Return the number of virtual ranks, their seed, and the threads per rank."""
        return {"count": self._count, "seed": self._seed, "threads": self._threads}

    def mismatch(self, saved: Mapping[str, int] | None) -> str | None:
        """Return a message if ``saved`` has another number of virtual ranks or threads than this run; None if not, or
        for None."""
        if saved is None:
            return None
        for name, mine in (("count", self._count), ("threads", self._threads)):
            if saved[name] != mine:
                what = "virtual ranks" if name == "count" else "torch threads per rank"
                return f"it was saved with {saved[name]} {what}, and here are {mine}"
        return None

    def load_state_dict(self, saved: Mapping[str, int] | None) -> None:
        """Take over the seed in ``saved``, and so the random numbers of the run that saved it; do nothing for None."""
        if saved is not None:
            self._seed = saved["seed"]

    def _summed(self) -> int:
        """Return how many of this rank's micro-batches the gradients have summed in this step; equal on all ranks."""
        found = (g.leaves.added for g in self._partition.runtime.gradients.values() if g.leaves is not None)
        return next(found, 0)

    def _seed_generators(self, step: int, virtual_rank: int) -> None:
        """Seed the generators of Python, NumPy and torch from the run's seed, ``step`` and ``virtual_rank``."""
        text = f"{self._seed}/{step}/{virtual_rank}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback for every kind of device
        if self._partition.device.type != "cpu":
            torch.get_device_module(self._partition.device).manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def micro_batches(config: Config, partition: Partition, module: nn.Module) -> MicroBatches:
    """Return the rules for micro-batches: `VirtualRanks` if ``config`` asks for them, which is collective, or
    ordinary."""
    if not config.virtual_ranks:
        return OrdinaryMicroBatches()
    return VirtualRanks(config.virtual_ranks, getattr(config.deterministic, "seed", None), partition, module)


def _persistent_buffers(module: nn.Module) -> list[_Buffer]:
    """Return the buffers of ``module`` that checkpoints hold, and others that share memory with them."""
    found = [
        _Buffer(f"{name}.{key}" if name else key, owner, key)
        for name, owner in module.named_modules()
        for key in owner._buffers
    ]
    groups = overlapping([torch.empty(0) if (b := one.module._buffers[one.key]) is None else b for one in found])
    stored = [one.key not in one.module._non_persistent_buffers_set for one in found]
    return [found[number] for numbers in groups if any(stored[n] for n in numbers) for number in numbers]
