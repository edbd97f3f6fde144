"""The random numbers and the autocast under which a tile was computed, so that backward computes it alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import get_device_states, set_device_states


@dataclass(frozen=True)
class AutocastState:
    """The state of autocast for one type of device: whether it is on, its dtype, and whether casts are cached."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cached: bool

    @staticmethod
    def of(device_type: str) -> AutocastState:
        """Return the present state of autocast for ``device_type`` in the calling thread."""
        return AutocastState(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    def opened(self) -> torch.autocast:
        """Return a context in which autocast is in this state."""
        return torch.autocast(self.device_type, self.dtype, self.enabled, self.cached)


@dataclass(frozen=True)
class RandomState:
    """The states of the host's default generator and of those of the devices that some tensors are on."""

    device_type: str
    host: torch.Tensor
    devices: list[int]
    states: list[torch.Tensor]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> RandomState:
        """Return the present states of the generators, those of the devices that ``tensors`` are on included."""
        devices, states = get_device_states(*tensors)
        return RandomState(_device_type(tensors), torch.get_rng_state(), devices, states)

    def set(self) -> None:
        """Set the host's default generator and those of the devices to these states."""
        torch.set_rng_state(self.host)
        if self.devices:
            set_device_states(self.devices, self.states, device_type=self.device_type)


@dataclass(frozen=True)
class TileSurroundings:
    """The inputs of a computation that are no arguments: the random states and autocast."""

    random: RandomState
    autocast: tuple[AutocastState, ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> TileSurroundings:
        """Return the present random states, and states of autocast, of the host and of the devices of ``tensors``."""
        types = {"cpu", _device_type(tensors)}
        usable = [kind for kind in sorted(types) if torch.amp.is_autocast_available(kind)]
        return TileSurroundings(RandomState.of(tensors), tuple(AutocastState.of(kind) for kind in usable))

    @contextmanager
    def restored(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context manager: inside it the generators and autocast are in these states; at the end the generators get the
        states that they had at its start. ``tensors``: the same as for `of`, or others on the same devices."""
        before = RandomState.of(tensors)
        with ExitStack() as stack:
            for state in self.autocast:
                stack.enter_context(state.opened())
            stack.callback(before.set)
            self.random.set()
            yield


def _device_type(tensors: Sequence[torch.Tensor]) -> str:
    """Return the type of the device of the first tensor that is not on the host; "cpu" if there is none."""
    return next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), "cpu")
