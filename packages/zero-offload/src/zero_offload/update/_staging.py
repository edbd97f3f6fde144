"""Gradients to the host and weights back, one slice at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from .._lanes import Lane
from .._memory import HostBlock, nbytes_of
from ._entries import Fragment

__all__ = ["Courier", "DirectCourier", "Load", "StagingCourier", "staging_bytes"]

_ALIGN = 64


class Load(NamedTuple):
    """A fragment's gradient and weights, both 1-D."""

    grad: torch.Tensor
    weights: torch.Tensor


class Courier(Protocol):
    """`fetch` a slice (at best while the one before it computes), use its `loads`, then `send` the weights."""

    def fetch(self, position: int, loads: Sequence[Load]) -> None:
        """Start bringing the gradients of the slice at this position of the step."""

    def loads(self, position: int) -> Sequence[Load]:
        """The slice in host memory: gradients that have arrived, and where new weights are to be written."""

    def send(self, position: int) -> None:
        """Start taking the new weights to the parameters."""

    def finish(self) -> None:
        """Make the compute device wait for everything sent."""

    @property
    def resident_bytes(self) -> int:
        """Host memory held between steps."""


class DirectCourier:
    """For parameters in host memory: the kernels read and write them where they are."""

    resident_bytes = 0

    def __init__(self) -> None:
        self._loads: dict[int, Sequence[Load]] = {}

    def fetch(self, position: int, loads: Sequence[Load]) -> None:
        self._loads[position] = loads

    def loads(self, position: int) -> Sequence[Load]:
        return self._loads.pop(position)

    def send(self, position: int) -> None:
        """They are there already."""

    def finish(self) -> None:
        """Nothing is under way."""


def staging_bytes(slices: Sequence[tuple[Fragment, ...]]) -> int:
    """Host memory of a `StagingCourier`: gradients and weights of the largest slice, twice."""
    return 2 * max((sum(2 * _room(f.length * f.entry.param.element_size()) for f in s) for s in slices), default=0)


def _room(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class StagingCourier:
    """For parameters on an accelerator: two blocks of host memory take turns, copies run on a stream of their own."""

    def __init__(self, device: torch.device, slices: Sequence[tuple[Fragment, ...]]) -> None:
        self._lane = Lane(device)
        half = staging_bytes(slices) // 2
        self._blocks = [HostBlock(half, pin=device.type != "cpu") for _ in range(2)]
        self._outgoing: list[torch.Event | None] = [None, None]
        self._incoming: list[torch.Event | None] = [None, None]
        self._device: list[Sequence[Load]] = [(), ()]
        self._host: list[list[Load]] = [[], []]

    @property
    def resident_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def fetch(self, position: int, loads: Sequence[Load]) -> None:
        side = position % 2
        _wait(self._outgoing[side])  # the block's weights of two slices ago must have left
        self._outgoing[side] = None
        self._device[side] = loads
        self._host[side] = []
        offset = 0
        for load in loads:
            views = []
            for tensor in load:
                views.append(self._blocks[side].view(offset, tensor.numel(), tensor.dtype))
                offset += _room(nbytes_of(tensor))
            if load.grad.device.type == "cpu" and load.weights.device.type != "cpu":
                views[0] = load.grad  # offloaded already
            else:
                self._incoming[side] = self._lane.copy(views[0], load.grad)
            self._host[side].append(Load(*views))

    def loads(self, position: int) -> Sequence[Load]:
        side = position % 2
        _wait(self._incoming[side])
        self._incoming[side] = None
        return self._host[side]

    def send(self, position: int) -> None:
        side = position % 2
        for host, device in zip(self._host[side], self._device[side], strict=True):
            self._outgoing[side] = self._lane.copy(device.weights, host.weights)
        self._device[side] = ()

    def finish(self) -> None:
        for event in self._outgoing:
            self._lane.join(event)


def _wait(event: torch.Event | None) -> None:
    if event is not None:
        event.synchronize()
