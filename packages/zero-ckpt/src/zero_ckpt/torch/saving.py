"""`save` a dict of modules, optimizers, stateful objects, tensors and plain data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ..async_saver import AsyncSaver
from ..saving import save_sharded
from ..types import STATE_KIND, Coordinator, Interval
from .buffers import Stager, tensor_buffer
from .coordinator import default_coordinator
from .dtensors import local_part
from .modules import module_state, parameter_names
from .optimizers import describe_optimizer
from .rng import RngState
from .tree import encode


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is a dict of plain data and tensors, which `load_state_dict` takes back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors may be the object's own, and are copied or written by the save."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state that `state_dict` returned, with tensors in CPU memory."""
        ...


def save(
    root: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int = 0,
    tag: str | None = None,
    exclude_frozen: bool = False,
    keep_last: int | None = None,
    config: Any = None,
    node: str | None = None,
    coordinator: Coordinator | None = None,
    saver: AsyncSaver | None = None,
) -> Path:
    """Save `state` as checkpoint `<root>/<tag>` (by default `step<step>`) and return that path; collective.

    Values of `state` are modules (plain, DDP, FSDP2), optimizers, objects with `state_dict` and `load_state_dict`,
    tensors, and plain data. The only module is stored under its own parameter names, one of several under
    `<key>.<name>`. `RngState` objects and generators are stored per rank, everything else once; sharded tensors are
    written by the ranks that hold them. `exclude_frozen` leaves out parameters that need no gradient; `config`, plain
    data, is stored with the rest; `keep_last` and `node` are those of `save_sharded`. Without a `coordinator` the ranks
    are those of the default process group. With an AsyncSaver the state is copied and written in the background (its
    coordinator is used). Raises CheckpointError as `save_sharded` does.
    """
    parts = Parts(state)
    tensors, client, own = parts.describe(exclude_frozen)
    aliases = {name: target for module in parts.modules.values() for name, target in module.aliases.items()}
    name = tag if tag is not None else f"step{step}"
    options: dict[str, Any] = {
        "step": step,
        "aliases": aliases,
        "frozen": parts.frozen() if parts.modules else None,
        "client_state": client,
        "rank_state": own or None,
        "keep_last": keep_last,
        "config": config,
        "node": node,
    }
    if saver is not None:
        saver.save(root, name, _intervals(tensors), **options)
        return Path(root) / name
    return save_sharded(root, name, _intervals(tensors), coordinator=coordinator or default_coordinator(), **options)


class Parts:
    """The values of a `state` given to `save` or `load`, sorted by type: `modules` has the modules by key of the state,
    and `names` maps the `id` of their tensors to names.

    A module's tensors have the module's own names; if there are several modules, `<key>.` is put before them.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state
        found = {key: value for key, value in state.items() if isinstance(value, torch.nn.Module)}
        self.modules = {key: module_state(value, "" if len(found) == 1 else f"{key}.") for key, value in found.items()}
        self.names = parameter_names(list(self.modules.values()))

    def frozen(self) -> list[str]:
        """Return the names of parameters that need no gradient."""
        return [
            name
            for module in self.modules.values()
            for name, tensor in module.tensors.items()
            if module.kind(name) == "param" and not tensor.requires_grad
        ]

    def describe(
        self, exclude_frozen: bool
    ) -> tuple[list[tuple[str, str, torch.Tensor]], dict[str, Any], dict[str, Any]]:
        """Return (tensors as (name, kind, tensor), the plain data that is stored once, the plain data of this rank);
        both plain data by key of the state.

        `exclude_frozen` leaves out parameters that need no gradient. Tensors in the state of stateful objects are named
        by their path. Raises NotPlainDataError for a value that is neither tensor nor plain data.
        """
        tensors: list[tuple[str, str, torch.Tensor]] = []
        client: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in self.state.items():
            extra: dict[str, torch.Tensor] = {}
            if key in self.modules:
                module = self.modules[key]
                client[key] = {"$module": encode(module.extra, key, extra)}
                tensors += [
                    (name, module.kind(name), tensor)
                    for name, tensor in module.tensors.items()
                    if not (exclude_frozen and module.kind(name) == "param" and not tensor.requires_grad)
                ]
            elif isinstance(value, torch.optim.Optimizer):
                client[key], found = describe_optimizer(value, self.names, key)
                tensors += found
            elif isinstance(value, (RngState, torch.Generator)):
                own[key] = _generator_state(value)
            else:
                client[key] = encode(_state_or_value(value), key, extra)
            tensors += [(name, STATE_KIND, tensor) for name, tensor in extra.items()]
        return tensors, client, own


def _state_or_value(value: Any) -> Any:
    """Return the state dict of `value` if it is a stateful object, else `value` itself."""
    return value.state_dict() if isinstance(value, Stateful) else value


def _generator_state(value: RngState | torch.Generator) -> Any:
    """Return a generator's state as plain data."""
    return value.state_dict() if isinstance(value, RngState) else bytes(tensor_buffer(value.get_state()))


def _intervals(tensors: Iterable[tuple[str, str, torch.Tensor]]) -> Iterable[Interval]:
    """Yield the intervals of this rank's parts of `tensors`, (name, kind, tensor) each; they use the tensors' memory
    without a copy where that is possible.

    Nothing is yielded for a tensor of which this rank holds no element, unless the tensor is empty. Raises
    CheckpointError for a dtype or placement that cannot be stored.
    """
    stager = Stager()
    for name, kind, tensor in tensors:
        local, runs = local_part(tensor.detach(), name)
        flat = local.reshape(-1) if len(runs) > 1 else local
        for run in runs:
            part = flat[run.local : run.local + run.length] if len(runs) > 1 else local
            yield from stager.intervals(name, kind, part, shape=tensor.shape, offset=run.whole)
        if not runs and tensor.numel() == 0:
            yield from stager.intervals(name, kind, local)
