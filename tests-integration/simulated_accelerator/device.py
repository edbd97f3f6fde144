"""`torch.sim`: the module that torch asks for what only a device's own package knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

NAME = "sim"


class DeviceModule(ModuleType):
    """The functions of `torch.cuda` that portable code calls, for the simulated accelerator."""

    Stream = torch.Stream
    Event = torch.Event

    def __init__(self, native: Any) -> None:
        super().__init__(f"torch.{NAME}")
        self._native = native

    def is_available(self) -> bool:
        """Return True if this process has a device."""
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        """Return True: a device needs no initialisation."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Return the number of devices of this process."""
        return int(self._native.device_count())

    def current_device(self) -> int:
        """Return the index of the current device of this thread."""
        return int(self._native.exchange_device(-1))

    def set_device(self, device: int | str | torch.device) -> None:
        """Make a device the current one of this thread."""
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None:
            self._native.exchange_device(index)

    @contextmanager
    def device(self, device: int | str | torch.device) -> Iterator[None]:
        """Return a context in which a device is the current one."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def get_device_name(self, device: Any = None) -> str:
        """Return the name of a device."""
        return "simulated accelerator"

    def current_stream(self, device: Any = None) -> torch.Stream:
        """Return the current stream of a device."""
        return torch.accelerator.current_stream(device)

    def synchronize(self, device: Any = None) -> None:
        """Wait for everything that is queued on a device."""
        torch.accelerator.synchronize(device)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of `torch.autocast`."""
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        """Return True."""
        return True

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        self._generator(None).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        for index in range(self.device_count()):
            self._generator(index).manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the state of a device's generator, on the CPU."""
        return self._generator(device).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Set the state of a device's generator."""
        self._generator(device).set_state(state)

    def memory_allocated(self, device: Any = None) -> int:
        """Return the bytes of live tensors."""
        return torch.accelerator.memory_allocated(device)

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the peak of `memory_allocated`."""
        return torch.accelerator.max_memory_allocated(device)

    def empty_cache(self) -> None:
        """Wait for all devices; freed memory may be used again by every stream."""
        torch.accelerator.empty_cache()

    def _generator(self, device: Any) -> torch.Generator:
        index = torch.device(NAME, device).index if isinstance(device, int) else torch.device(device or NAME).index
        generator: torch.Generator = self._native.default_generator(-1 if index is None else index)
        return generator
