"""The tensors of a module, and the names under which they are stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass
class ModuleState:
    """A module's state. `tensors` has each tensor once, by name; `aliases` maps the other names of a tied tensor to
    that name; `extra` has the other entries of the state dict."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def kind(self, name: str) -> str:
        """Return the kind of the tensor `name`: `param` or `buffer`. Raises KeyError for another name."""
        return "param" if isinstance(self.tensors[name], torch.nn.Parameter) else "buffer"


def module_state(module: torch.nn.Module, prefix: str = "") -> ModuleState:
    """Return the state of a module: its parameters and persistent buffers, which are not copied, and the other entries
    of its state dict.

    Names are without the wrappers of DDP, compilation and activation checkpointing; `prefix` is put before each.
    """
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    state = ModuleState()
    names: dict[int, str] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        name = prefix + ".".join(part for part in key.split(".") if part not in _WRAPPERS)
        if not isinstance(value, torch.Tensor):
            state.extra[name] = value
        elif id(value) in names:
            state.aliases[name] = names[id(value)]
        else:
            names[id(value)] = name
            state.tensors[name] = value
    return state


def parameter_names(states: list[ModuleState]) -> dict[int, str]:
    """Return the names of all tensors of `states`, by `id` of the tensor."""
    return {id(tensor): name for state in states for name, tensor in state.tensors.items()}
