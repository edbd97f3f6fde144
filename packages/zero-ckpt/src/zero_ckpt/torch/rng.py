"""The random number generators of one rank."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from .buffers import tensor_buffer


class RngState:
    """The random number generators of this process: Python's, NumPy's (when imported), torch's for the CPU and for the
    accelerators.

    Put one into the dict that `save` and `load` take: every rank keeps its own states.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states as plain data; NumPy's only if it is imported, the current accelerator's only if there is
        one."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": [version, list(words), gauss],
            "torch": bytes(tensor_buffer(torch.get_rng_state())),
        }
        if "numpy" in sys.modules:
            name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
            state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if device is not None:
            state["accelerator"] = bytes(tensor_buffer(torch.get_device_module(device).get_rng_state()))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator of this process of which `state_dict` has a state; states of generators that this process
        lacks are ignored."""
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(torch.frombuffer(bytearray(state_dict["torch"]), dtype=torch.uint8))
        if "numpy" in state_dict and "numpy" in sys.modules:
            numpy = sys.modules["numpy"]
            name, keys, *rest = state_dict["numpy"]
            numpy.random.set_state((name, numpy.array(keys, dtype="uint32"), *rest))
        if "accelerator" in state_dict and torch.accelerator.is_available():
            module = torch.get_device_module(torch.accelerator.current_accelerator())
            module.set_rng_state(torch.frombuffer(bytearray(state_dict["accelerator"]), dtype=torch.uint8))
