"""`deepspeed.accelerator`: the machine's device by DeepSpeed's names, over `torch.accelerator`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import psutil
import torch

from zero_comm.setup import default_device
from zero_core.errors import UsageError

from .errors import UnsupportedError

_TENSOR_DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.double,
    "FloatTensor": torch.float,
    "HalfTensor": torch.half,
    "IntTensor": torch.int,
    "LongTensor": torch.long,
}


def compute_device() -> torch.device:
    """Return this rank's device: of the kind that DS_ACCELERATOR names (cpu, cuda, …), else torch's default.

    Raises `UsageError` when torch's device is of another kind.
    """
    wanted = os.environ.get("DS_ACCELERATOR")
    if wanted is None:
        return default_device()
    if wanted == "cpu":
        return torch.device("cpu")
    found = default_device()
    if found.type != wanted:
        raise UsageError(f"DS_ACCELERATOR is {wanted!r}, but torch's device here is {found.type!r}; unset the variable")
    return found


def is_current_accelerator_supported() -> bool:
    """Return whether torch supports the device of `get_accelerator` on this machine: always True."""
    return get_accelerator().is_available()


def get_accelerator() -> Accelerator:
    """Return the accelerator that this process computes on."""
    return Accelerator(compute_device())


class Accelerator:
    """One kind of device (cpu, cuda, ...), by DeepSpeed's names. Memory is in bytes. Calls about caches, peaks or
    ranges do nothing on a CPU.

    ``device``: only its kind counts. A ``device_index`` of None means the current device. Tensor types (`FloatTensor`)
    and, on an accelerator, `Event`, `Stream`, `stream`, `current_stream` and `default_stream` are attributes too.
    """

    def __init__(self, device: torch.device) -> None:
        self._name = device.type
        self._on_cpu = device.type == "cpu"
        self._module: Any = torch.get_device_module(device.type)

    # -- devices -----------------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """Return `cpu`, `cuda` or, with an index, `cuda:1`; always `cpu` on the CPU."""
        return self._name if device_index is None or self._on_cpu else f"{self._name}:{device_index}"

    def current_device(self) -> int | str:
        """Return the index of the current device; `cpu` on the CPU."""
        return "cpu" if self._on_cpu else int(torch.accelerator.current_device_index())

    def current_device_name(self) -> str:
        """Return the name of the current device, such as `cuda:1`."""
        return "cpu" if self._on_cpu else f"{self._name}:{torch.accelerator.current_device_index()}"

    def device(self, device_index: int | None = None) -> Any:
        """Return torch's context manager in which the device with this index is current; on the CPU one that does
        nothing."""
        return nullcontext() if self._on_cpu else self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Make the device with this index current; do nothing on the CPU."""
        if not self._on_cpu:
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """Return the number of devices of this host; on the CPU the number of ranks on this host, by LOCAL_SIZE or
        else LOCAL_WORLD_SIZE; a value that is no number above 0 counts as absent, and without either it is 1."""
        if not self._on_cpu:
            return torch.accelerator.device_count()
        told = (os.environ.get(name, "").strip() for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"))
        return next((int(ranks) for ranks in told if ranks.isdecimal() and int(ranks) > 0), 1)

    def is_available(self) -> bool:
        """Return True: the device was found."""
        return True

    def is_synchronized_device(self) -> bool:
        """Return whether operations are synchronous, that is finished when their call returns: only on the CPU."""
        return self._on_cpu

    def use_host_timers(self) -> bool:
        """Return whether times are taken by the host's clock: only on the CPU."""
        return self._on_cpu

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has finished all its work; return at once on the CPU."""
        if not self._on_cpu:
            torch.accelerator.synchronize(device_index)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this kind of device."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """Return the name of torch.distributed's default backend for the device."""
        return "gloo" if self._on_cpu else torch.distributed.get_default_backend_for_device(self._name)

    # -- random numbers ----------------------------------------------------------------------------------------------

    def random(self) -> Any:
        """Return `torch.random`, the module with the functions of random generators."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        torch.manual_seed(seed) if self._on_cpu else self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.manual_seed(seed) if self._on_cpu else self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        """Return the seed of the current device's generator."""
        return torch.initial_seed() if self._on_cpu else int(self._module.initial_seed())

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the state of the device's random generator, as a 1-D uint8 CPU tensor for `set_rng_state`."""
        if self._on_cpu:
            return torch.get_rng_state()
        state: torch.Tensor = self._module.get_rng_state(*([] if device_index is None else [device_index]))
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of the device's random generator to ``new_state``, a result of `get_rng_state`."""
        if self._on_cpu:
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, *([] if device_index is None else [device_index]))

    # -- memory ------------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Free the memory that torch's allocator caches."""
        if not self._on_cpu:
            self._module.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of tensors on the device; on the CPU the resident bytes of the process."""
        return self._memory_nbytes("memory_allocated", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak of `memory_allocated`; on the CPU its current value."""
        return self._memory_nbytes("max_memory_allocated", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes that torch's allocator holds, cached ones included; on the CPU as `memory_allocated`."""
        return self._memory_nbytes("memory_reserved", device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the peak of `memory_reserved`; on the CPU its current value."""
        return self._memory_nbytes("max_memory_reserved", device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset the peaks of allocated and reserved memory to their current values; do nothing on the CPU."""
        if not self._on_cpu:
            self._module.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Return torch's memory statistics by name; empty on the CPU."""
        return {} if self._on_cpu else dict(self._module.memory_stats(device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory (None: the current device's); on the CPU of the host's."""
        if self._on_cpu:
            return int(psutil.virtual_memory().total)
        index = torch.accelerator.current_device_index() if device_index is None else device_index
        return int(self._module.get_device_properties(index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory that this process has not allocated; on
        the CPU those that processes can get."""
        if self._on_cpu:
            return int(psutil.virtual_memory().available)
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return a copy of ``tensor``, a CPU tensor, in pinned host memory; if the accelerator is the CPU, the tensor
        itself. ``make_copy`` and ``match_shape`` have no effect."""
        return tensor if self._on_cpu else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in pinned host memory (on the CPU: in host memory)."""
        return tensor.device.type == "cpu" if self._on_cpu else tensor.is_pinned()

    # -- dtypes ------------------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bfloat16; True for the CPU and for devices that do not say."""
        return True if self._on_cpu else bool(getattr(self._module, "is_bf16_supported", lambda: True)())

    def is_fp16_supported(self) -> bool:
        """Return True: every device computes in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that parameters may have."""
        return [torch.float, torch.half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    # -- streams, ranges, compilation --------------------------------------------------------------------------------

    def range_push(self, msg: str, *_where: Any) -> None:
        """Begin a range named ``msg`` in a CUDA profile (NVTX); do nothing on other devices. Other arguments have no
        effect."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self, *_where: Any) -> None:
        """End the NVTX range that `range_push` began last; do nothing on devices other than CUDA."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Call ``callback`` at once: there is nothing to wait for."""
        callback()

    def is_triton_supported(self) -> bool:
        """Return whether Triton has a back end for this kind of device: for `cuda` and `xpu`."""
        return self._name in ("cuda", "xpu")

    def get_compile_backend(self) -> str:
        """Return torch.compile's default backend."""
        return "inductor"

    def __getattr__(self, name: str) -> Any:
        """Return, for `FloatTensor` and its like, a function that makes a tensor of that dtype on the device; for
        streams and events (not on the CPU) the attribute of torch's device module, such as `torch.cuda`. Raises
        `UnsupportedAttribute` for any other name."""
        if name in _TENSOR_DTYPES:
            return lambda values: torch.tensor(values, dtype=_TENSOR_DTYPES[name], device=self._name)
        if name in ("Event", "Stream", "current_stream", "default_stream", "stream") and not self.__dict__["_on_cpu"]:
            return getattr(self._module, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedAttribute(f"accelerator.{name} is not available here; use torch.accelerator")

    def _memory_nbytes(self, what: str, device_index: int | None) -> int:
        """Return the bytes that the function named ``what`` of torch's device module (such as `torch.cuda`) returns; on
        the CPU the resident bytes of the process."""
        if self._on_cpu:
            return int(psutil.Process().memory_info().rss)
        return int(getattr(self._module, what)(device_index))


class UnsupportedAttribute(UnsupportedError, AttributeError):
    """An attribute of DeepSpeed's accelerator that is not available; `hasattr` is False for it."""
