"""The highest moment of a run: what is alive then, by owner, which is a unit of the engine or a module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from zero_core.engine import Engine
from zero_partition import DeviceResidency, Unit

from ..planned import LiveRow, Peak
from .memory import LiveMemory

_OWNERS = 10


class PeakWatch:
    """Follows what an engine and its model keep alive, and finds the highest moment; inside the block.

    ``kind``: of the device that counts. It is a unit watch of the engine too.

    Attributes:
        memory: the storages; the mode that runs operations reports their results to it.
        phase: what the engine does now.
    """

    def __init__(self, kind: str = "cpu") -> None:
        self.memory = LiveMemory(self._where, self._note)
        self.phase = "model"
        self._kind = kind
        self._running: list[str] = []
        self._over = ""
        self._names: dict[int, str] = {}
        self._handles: list[RemovableHandle] = []
        self._engine: Engine | None = None
        self._peak = Peak(0, "", "", (), 0)

    def __enter__(self) -> PeakWatch:
        self._handles = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def follow(self, engine: Engine) -> None:
        """Find the highest moment from now on, and what the engine holds in it."""
        self._engine = engine
        self._names = {id(module): name for name, module in engine.module.named_modules()}
        engine.partition.runtime.watch_units(self)
        self._name(engine.partition.units)
        self.memory.look()
        self.memory.restart()

    def peak(self) -> Peak:
        """Return the highest moment so far."""
        self.memory.look()
        self.memory.settle()
        return self._peak

    def enters(self, units: Iterable[Unit]) -> None:
        """A module that uses ``units`` begins."""
        self._name(units)

    def leaves(self, units: Iterable[Unit]) -> None:
        """That module is over."""

    def backward_done(self, unit: Unit) -> None:
        """The unit has its gradients."""
        self._over = unit.name
        self._name([unit])

    def _begins(self, module: nn.Module, _inputs: object) -> None:
        self._running.append(self._names.get(id(module), ""))

    def _ends(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        self._over = self._running.pop() or self._over

    def _where(self) -> str:
        running = next((name for name in reversed(self._running) if name), "")
        return running or (f"after {self._over}" if self._over else self.phase)

    def _note(self, kind: str) -> None:
        engine = self._engine
        if kind != self._kind or engine is None:
            return
        self._name(engine.partition.units)
        sums: dict[tuple[str, str], int] = {}
        for held in self.memory.held.values():
            if held.device == kind and held.nbytes:
                key = held.owner or ("activations", held.origin)
                sums[key] = sums.get(key, 0) + held.nbytes
        rows = sorted((LiveRow(*key, nbytes) for key, nbytes in sums.items()), key=lambda row: -row.nbytes)
        activations = sum(row.nbytes for row in rows if row.kind == "activations")
        self._peak = Peak(self.memory.peak[kind], self.phase, self.memory.place, tuple(rows[:_OWNERS]), activations)

    def _name(self, units: Iterable[Unit]) -> None:
        """Give what the engine holds for ``units`` its owner."""
        engine = self._engine
        if engine is None:
            return
        for unit in units:
            for kind, tensor in _held_for(engine, unit):
                held = self.memory.held.get(tensor.untyped_storage()._cdata)
                if held is not None and held.owner is None:
                    held.owner = (kind, unit.name)


def _held_for(engine: Engine, unit: Unit) -> Iterator[tuple[str, torch.Tensor]]:
    parts, optimizer = engine.partition, engine.sharded_optimizer
    yield "gathered parameters", unit.flat
    if isinstance(parts.residency, DeviceResidency):
        yield "parameter shards", parts.residency.acquire(unit.name)
    if unit.master is not None:
        yield "masters", unit.master
    gradients = parts.runtime.gradients.get(unit.index)
    if gradients is not None:
        yield from (("gradients", tensor) for tensor in gradients.tensors())
    for owned in () if optimizer is None else optimizer.fragments:
        if owned.unit is unit:
            states = optimizer.state_of(owned).values() if optimizer is not None else ()
            yield from (("optimizer states", value) for value in states if isinstance(value, torch.Tensor))
