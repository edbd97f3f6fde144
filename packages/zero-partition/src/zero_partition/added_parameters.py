"""Parameters that were put into the model after it was sharded: the ranks have to have the same values of them.

A registration is torch's word for an assignment of a module or parameter to an attribute of a module. The model's tree
is its modules and their submodules.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from .checksums import checksums
from .errors import STEP_DROPPED, PartitionError
from .host_facts import is_plain
from .ownership import find_owner
from .sharded_parameter import sharded_record

Exchange = Callable[[str, str, Any], list[Any]]
"""Tells all ranks a payload of a kind and name, and returns every rank's: `Runtime.agree`."""


class _Values(NamedTuple):
    """The facts of a parameter's values when they were last looked at: address, version counter, and a checksum."""

    address: int
    version: int
    checksum: int


class AddedParameters:
    """Knows which parameters of ``model`` have come into it since this object was made.

    The engine neither averages their gradients nor updates them, so code that trains them, or draws their first values,
    may leave different values on each rank. The model's tree is looked at again only after torch has reported the
    registration of a module or parameter in a module of the model, or when a list of modules has another length:
    ``insert`` is not reported.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known = {id(parameter): parameter for parameter in model.parameters()}
        self._remember_tree(model)
        self._has_changed = False
        self._added: dict[str, nn.Parameter] = {}
        self._seen: dict[int, _Values] = {}
        report = weakref.WeakMethod(self._registered)

        def hook(module: nn.Module, name: str, value: object) -> None:
            """Pass ``module``, in which something was registered, to this object's `_registered`, if the object still
            exists."""
            if (call := report()) is not None:
                call(module)

        # removed by `close` alone: garbage is collected anywhere, also while torch iterates over its hooks
        self._handles = (
            register_module_module_registration_hook(hook),
            register_module_parameter_registration_hook(hook),
        )

    def close(self) -> None:
        """Remove the hooks by which torch reports registrations."""
        for handle in self._handles:
            handle.remove()

    def digest(self) -> int:
        """Return a 32-bit digest of the added parameters' names and values; 0 while there are none. Looks for newly
        added ones first if the model's tree may have changed. Waits for the device that holds their values."""
        if self._has_changed or list(map(len, self._lists)) != self._lengths:
            self._find_added()
        return zlib.crc32(repr(self._values()).encode()) if self._added else 0

    def refuse(self, exchange: Exchange, rest: str = STEP_DROPPED) -> NoReturn:
        """Raise `PartitionError` that names the first added parameter whose values differ between ranks; called on
        every rank when the digests differ. Collective.

        ``exchange``: tells all ranks a payload and returns every rank's. ``rest``: the end of the message.
        """
        self._seen.clear()
        everyones = [dict(values) for values in exchange("added parameters", "", self._values())]
        names = dict.fromkeys(name for values in everyones for name in values)
        apart = [name for name in names if len({values.get(name) for values in everyones}) > 1]
        raise PartitionError(
            f"parameter '{apart[0] if apart else next(iter(names), '')}' was put into the model after initialize, and "
            "ranks have different values of it: the engine neither averages its gradient nor updates it. Give it the "
            "same first values on every rank, and where another optimizer trains it, average its gradient over the "
            "ranks (torch.distributed.all_reduce) before that optimizer's step; or call engine.destroy() and "
            f"initialize with the model as it is now. {rest}"
        )

    def _registered(self, module: nn.Module) -> None:
        """Have the next `digest` look through the model's tree, as ``module`` got a parameter or a module; do nothing
        if ``module`` is not in the model."""
        if id(module) in self._modules:
            self._has_changed = True

    def _remember_tree(self, model: nn.Module) -> None:
        """Remember the modules of ``model`` and the lengths of its lists of modules (ModuleList, Sequential)."""
        self._modules = {id(module) for module in model.modules()}
        self._lists = [m._modules for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
        self._lengths = list(map(len, self._lists))

    def _find_added(self) -> None:
        """Find the added parameters in the model's tree for `_values`, and remember the tree; do nothing if the model
        is gone."""
        self._has_changed = False
        model = self._model()
        if model is None:
            return
        self._remember_tree(model)
        self._added = {
            name: parameter
            for name, parameter in model.named_parameters()
            if id(parameter) not in self._known and _is_compared(parameter)
        }
        held = set(map(id, self._added.values()))
        self._seen = {number: values for number, values in self._seen.items() if number in held}

    def _values(self) -> list[tuple[str, int]]:
        """Return (name, 64-bit checksum) of each added parameter.

        Those that require gradients are read each time, as writes through ``.data`` leave no trace; frozen ones if
        their address or version counter has changed.
        """
        found = []
        for name, parameter in self._added.items():
            data = parameter.detach()
            address, version = data.data_ptr(), 0 if parameter.is_inference() else parameter._version
            last = self._seen.get(id(parameter))
            if last is None or parameter.requires_grad or last[:2] != (address, version):
                plain = data.resolve_conj().resolve_neg()
                whole = (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous()
                last = self._seen[id(parameter)] = _Values(address, version, int(checksums([whole])[0]))
            found.append((name, last.checksum))
        return found


def _is_compared(parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` has values of its own that ranks can compare: no engine or `Init` has them, and they
    are dense, not empty and not on the meta device."""
    is_foreign = find_owner(parameter) is None and sharded_record(parameter) is None
    is_dense = is_plain(parameter.data) and parameter.layout is torch.strided and not parameter.is_quantized
    return is_foreign and is_dense and parameter.numel() > 0 and parameter.device.type != "meta"
