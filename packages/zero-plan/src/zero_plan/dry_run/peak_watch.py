"""The highest moment of a run on each tier: what is alive then, by owner, a unit of the engine or a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from zero_core.engine import Engine
from zero_partition import DeviceResidency, Unit

from ..planned import MEMORY_TIERS, LiveRow, Peak
from .memory import LiveMemory, LiveStorage

_OWNERS = 10


class PeakWatch:
    """Follows what an engine and its model keep alive, and finds the highest moment of each tier; inside the block.

    ``kind``: of the device that computes. It is a unit watch of the engine too.

    Attributes:
        memory: the storages; the mode that runs operations reports their results to it.
        phase: what the engine does now.
    """

    def __init__(self, kind: str = "cpu") -> None:
        self.memory = LiveMemory(kind, self._where, self._note)
        self.phase = "model"
        self._running: list[str] = []
        self._over = ""
        self._names: dict[int, str] = {}
        self._handles: list[RemovableHandle] = []
        self._engine: Engine | None = None
        self._earlier: list[LiveStorage] = []
        self._peaks: dict[str, Peak] = {}

    def __enter__(self) -> PeakWatch:
        self._handles = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def computing(self) -> bool:
        """Return whether a module runs now."""
        return bool(self._running)

    def begin_engine(self) -> None:
        """An engine is about to be made: what is alive and will not be its own belongs to the script."""
        self._earlier = list(self.memory.held.values())

    def follow(self, engine: Engine) -> None:
        """Find the highest moment from now on, and what the engine holds in it."""
        self._engine = engine
        self._names = {id(module): name for name, module in engine.module.named_modules()}
        engine.partition.runtime.watch_units(self)
        self._name(engine.partition.units)
        self._leave_to_script(engine)
        self.restart(self.phase)

    def restart(self, phase: str) -> None:
        """Find the highest moments of another phase, from now on."""
        self.phase, self._over, self._peaks = phase, "", {}
        self.memory.look()
        self.memory.restart()

    def peaks(self) -> tuple[Peak, ...]:
        """Return the highest moment of each tier so far; the device comes first."""
        self.memory.look()
        self.memory.settle()
        return tuple(self._peaks[tier] for tier in MEMORY_TIERS if tier in self._peaks)

    def enters(self, units: Iterable[Unit]) -> None:
        """A module that uses ``units`` begins."""
        self._name(units)

    def leaves(self, units: Iterable[Unit]) -> None:
        """That module is over."""

    def backward_done(self, unit: Unit) -> None:
        """The unit has its gradients."""
        self._over = unit.name
        self._name([unit])

    def _leave_to_script(self, engine: Engine) -> None:
        """Count what the script had before its engine and the model has not, such as data, as memory of the host."""
        tensors = [*engine.module.parameters(), *engine.module.buffers()]
        of_model = {tensor.untyped_storage()._cdata for tensor in tensors}
        for held in self._earlier:
            storage = held.reference()
            if storage is not None and held.owner is None and not held.rows and storage._cdata not in of_model:
                self.memory.move(held, "pageable host", (LiveRow("data of the script", "", 0),))
        self._earlier = []

    def _begins(self, module: nn.Module, _inputs: object) -> None:
        self._running.append(self._names.get(id(module), ""))

    def _ends(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        self._over = self._running.pop() or self._over

    def _where(self) -> tuple[str, str]:
        running = next((name for name in reversed(self._running) if name), "")
        return self.phase, running or (f"after {self._over}" if self._over else self.phase)

    def _note(self, tier: str) -> None:
        engine = self._engine
        if tier not in MEMORY_TIERS or engine is None:
            return
        self._name(engine.partition.units)
        sums: Counter[tuple[str, str]] = Counter()
        for held in self.memory.held.values():
            if held.tier == tier and held.nbytes:
                sums.update(_owned(held))
        rows = [LiveRow(*key, nbytes) for key, nbytes in sums.most_common()]
        activations = sum(row.nbytes for row in rows if row.kind == "activations")
        found = self.memory.peak[tier]
        self._peaks[tier] = Peak(tier, found, *self.memory.moments[tier], tuple(rows[:_OWNERS]), activations)

    def _name(self, units: Iterable[Unit]) -> None:
        """Give what the engine holds for ``units`` its owner."""
        engine = self._engine
        if engine is None:
            return
        for unit in units:
            for kind, tensor in _held_for(engine, unit):
                held = self.memory.held.get(tensor.untyped_storage()._cdata)
                if held is not None and held.owner is None and not held.rows:
                    held.owner = (kind, unit.name)


def _owned(held: LiveStorage) -> dict[tuple[str, str], int]:
    """Bytes of a storage by the kind and name of their owners; what its rows leave over belongs to the first kind."""
    if not held.rows:
        return {held.owner or ("activations", held.origin): held.nbytes}
    found: Counter[tuple[str, str]] = Counter()
    for kind, name, nbytes in held.rows:
        found[kind, name] += nbytes
    over = held.nbytes - found.total()
    if over:
        found[held.rows[0].kind, ""] += over
    return found


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
