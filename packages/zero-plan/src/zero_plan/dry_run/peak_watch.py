"""The peaks of a run on each tier, with the owners of the live bytes: units of the engine (parameters that it gathers
and reduces together) or modules.
"""

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
_RESIZED = "gathered parameters"  # buffers that the engine resizes as it gathers and releases


class PeakWatch:
    """Tracks the live memory of an engine and its model, and finds the peak of each tier; used as a context manager,
    inside which it has hooks on every torch module of the process.

    The phase is that of training ("forward", "backward", "step", …), the place is the module or unit that ran last. An
    owner of memory is a kind of memory and a unit's name. ``kind``: the type of the computing device. It is also the
    engine's `UnitWatch`, whose calls tell it which units hold new memory.

    Attributes:
        memory: the storages; the mode that runs operations passes their results to it.
    """

    def __init__(self, kind: str = "cpu") -> None:
        self.memory = LiveMemory(kind, self._phase_and_place)
        self._phase = "model"
        self._running: list[str] = []
        self._last_done = ""  # the module or, in backward, unit that ended last
        self._names: dict[int, str] = {}  # of the engine's modules, by id
        self._handles: list[RemovableHandle] = []
        self._engine: Engine | None = None
        self._before_engine: list[LiveStorage] = []

    def __enter__(self) -> PeakWatch:
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def phase(self) -> str:
        """The phase of training, to which later peaks belong. Setting it first finds the owners of the engine's
        memory.
        """
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        """Find the owners of the engine's memory, then begin the phase called ``phase``."""
        self._assign_all_owners()
        self._phase = phase

    @property
    def computing(self) -> bool:
        """True while a module is running."""
        return bool(self._running)

    def begin_engine(self) -> None:
        """Remember the storages that are live before the script makes an engine. `follow` counts them as the script's
        own data, in host memory, unless they are the model's.
        """
        self._before_engine = list(self.memory.held.values())

    def follow(self, engine: Engine) -> None:
        """Find peaks and the owners of memory for ``engine`` from now on; forget the peaks before."""
        self._engine = engine
        self._names = {id(module): name for name, module in engine.module.named_modules()}
        engine.partition.runtime.watch_units(self)
        self._assign_all_owners()
        self._leave_to_script(engine)
        self.reset_peaks(self.phase)

    def reset_peaks(self, phase: str) -> None:
        """Forget the peaks and begin the phase called ``phase``."""
        self.phase, self._last_done = phase, ""
        self.memory.refresh_sizes()
        self.memory.reset_peaks()

    def peaks(self) -> tuple[Peak, ...]:
        """Return the peak of each tier since `reset_peaks`, the device first. A tier that is not used has none."""
        self.memory.refresh_sizes()
        self._assign_all_owners()
        return tuple(self._peak_of(tier) for tier in MEMORY_TIERS if self.memory.peak.get(tier))

    def enters(self, units: Iterable[Unit]) -> None:
        """Find the owners of the memory of ``units``. Called by the engine when a module that uses them begins."""
        self._assign_owners(units)

    def leaves(self, units: Iterable[Unit]) -> None:
        """Do nothing. Called by the engine when a module that uses ``units`` ends."""

    def backward_done(self, unit: Unit) -> None:
        """Make ``unit`` the place of the run and find the owners of its memory. Called by the engine when the unit has
        its gradients.
        """
        self._last_done = unit.name
        self._assign_owners([unit])

    def _leave_to_script(self, engine: Engine) -> None:
        """Count as host memory the script's own data: the storages that are older than ``engine`` and not part of its
        model.
        """
        tensors = [*engine.module.parameters(), *engine.module.buffers()]
        of_model = {tensor.untyped_storage()._cdata for tensor in tensors}
        for held in self._before_engine:
            storage = held.reference()
            if storage is not None and held.owner is None and not held.rows and storage._cdata not in of_model:
                self.memory.reassign(held, "pageable host", (LiveRow("data of the script", "", 0),))
        self._before_engine = []

    def _before_forward(self, module: nn.Module, _inputs: object) -> None:
        """Record that ``module`` begins to run. A forward pre-hook of every torch module."""
        self._running.append(self._names.get(id(module), ""))

    def _after_forward(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        """Record that the innermost running module has ended, also by an exception. A forward hook of every torch
        module.
        """
        self._last_done = self._running.pop() or self._last_done

    def _phase_and_place(self) -> tuple[str, str]:
        """Return (phase, place): the phase, and the name of the innermost running module, or of what ended last."""
        running = next((name for name in reversed(self._running) if name), "")
        return self.phase, running or (f"after {self._last_done}" if self._last_done else self.phase)

    def _peak_of(self, tier: str) -> Peak:
        """Return the peak of ``tier``, with its largest owners and the bytes of activations."""
        sums: Counter[tuple[str, str]] = Counter()
        for held, nbytes in self.memory.storages_at_peak(tier):
            sums.update(_bytes_by_owner(held, nbytes))
        rows = sorted((LiveRow(*key, nbytes) for key, nbytes in sums.items()), key=lambda row: (-row.nbytes, row))
        activations = sum(row.nbytes for row in rows if row.kind == "activations")
        found = self.memory.peak[tier]
        return Peak(tier, found, *self.memory.peak_places[tier], tuple(rows[:_OWNERS]), activations)

    def _assign_all_owners(self) -> None:
        """Record the engine's units as the owners of its memory, optimizer states included; do nothing before
        `follow`.
        """
        if self._engine is None:
            return
        self._assign_owners(self._engine.partition.units)
        optimizer = self._engine.sharded_optimizer
        if optimizer is None:
            return
        for owned in optimizer.fragments:
            for value in optimizer.state_of(owned).values():
                if isinstance(value, torch.Tensor):
                    self._assign_owner(value, "optimizer states", owned.unit.name)

    def _assign_owners(self, units: Iterable[Unit]) -> None:
        """Record ``units`` as the owners of the memory that the engine holds for them, except optimizer states. Do
        nothing before `follow`.
        """
        if self._engine is None:
            return
        for unit in units:
            for kind, tensor in _held_for(self._engine, unit):
                if self._assign_owner(tensor, kind, unit.name) and kind == _RESIZED:
                    self.memory.expect_resizing(tensor)

    def _assign_owner(self, tensor: torch.Tensor, kind: str, name: str) -> bool:
        """Make (``kind``, ``name``) the owner of the storage of ``tensor``, if that is tracked and has no owner yet;
        return whether this was done.
        """
        held = self.memory.held.get(tensor.untyped_storage()._cdata)
        if held is None or held.owner is not None or held.rows:
            return False
        held.owner = (kind, name)
        return True


def _bytes_by_owner(held: LiveStorage, nbytes: int) -> dict[tuple[str, str], int]:
    """Return ``nbytes``, the size of a storage, divided over its owners (kind, name). Bytes beyond those of its rows
    count to the first row's kind.
    """
    if not held.rows:
        return {held.owner or ("activations", held.origin): nbytes}
    found: Counter[tuple[str, str]] = Counter()
    for kind, name, part in held.rows:
        found[kind, name] += part
    over = nbytes - found.total()
    if over:
        found[held.rows[0].kind, ""] += over
    return found


def _held_for(engine: Engine, unit: Unit) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (kind, tensor) of the memory that ``engine`` holds for ``unit``: its buffer of full parameters, its shard
    if on the device, masters and gradients.

    Neither its secondary shard nor its optimizer states are among them.
    """
    parts = engine.partition
    yield _RESIZED, unit.flat
    if isinstance(parts.residency, DeviceResidency):
        yield "parameter shards", parts.residency.acquire(unit.name)
    if unit.master is not None:
        yield "masters", unit.master
    gradients = parts.runtime.gradients.get(unit.index)
    if gradients is not None:
        yield from (("gradients", tensor) for tensor in gradients.tensors())
