"""Repeat one unit's work and compare: the reductions of a step, and the gradient of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from zero_ckpt.torch import RngState
from zero_partition import Partition, UnitGradients, gathered

from ..state import TrainingState
from .digests import same_bits
from .loss_graph import LossGraph
from .module_calls import AuditedUnit, CallRecorder, ModuleCall


class RepeatedReductions:
    """Repeats one unit's reductions after each backward pass of a step and compares the averages. Between a rank's own
    gradient and the shard that the optimizer reads are the network and a sum. Both are repeated from a copy of the
    gradient taken before the first reduction. Attribute ``differences``: names of the parameters whose averages
    differed."""

    def __init__(self, gradients: UnitGradients, partition: Partition) -> None:
        self.differences: list[str] = []
        self._gradients = gradients
        self._runtime = partition.runtime
        self._rank = partition.rank
        self._tree = None if gradients.leaves is None else gradients.leaves.new_empty()

    @contextmanager
    def backward(self, step: int) -> Iterator[None]:
        """Copy the unit's gradients before they are reduced in the block, a backward pass of ``step``. Afterwards,
        unless the block raised, reduce the copies too and compare. Collective if the pass reduced the unit."""
        gradients = self._gradients
        average = self._present_average() if self._tree is None and gradients.is_reduced else None
        sent: list[torch.Tensor] = []

        def keep(flat: torch.Tensor, _present: Sequence[bool]) -> None:
            """Keep a copy of the unit's gradient buffer ``flat``; called before each reduction."""
            sent.append(flat.clone())

        gradients.watches.append(keep)
        try:
            yield
        finally:
            gradients.watches.remove(keep)
        if sent:  # as on every rank; others may still ask for gathers in their backward pass
            self._runtime.agree("audit", "reductions", None)
        for flat in sent:
            if self._tree is None:
                average = gradients.reduce_again(flat, average, step)
            else:
                average = self._tree.add(gradients.reduce_again(flat, None, step))
        if sent and average is not None:
            self._compare(average)

    def _present_average(self) -> torch.Tensor:
        """Return a copy of the unit's averaged gradient: of this rank's shard, at stage 0 of the full unit."""
        with self._gradients.averaged() as averaged:
            return averaged.clone()

    def _compare(self, again: torch.Tensor) -> None:
        """Add to `differences` the parameters whose averaged gradient differs from ``again``, of the same elements."""
        layout = self._gradients.unit.layout
        with self._gradients.averaged() as averaged:
            if averaged.numel() == layout.numel:
                places = [(entry.name, entry.offset, entry.end) for entry in layout.entries]
            else:
                places = [
                    (fragment.entry.name, fragment.shard_offset, fragment.shard_offset + fragment.length)
                    for fragment in layout.fragments(self._rank)
                ]
            for name, start, end in places:
                if not same_bits(averaged[start:end], again[start:end].to(averaged.device)):
                    self.differences.append(name)


_REPEATS = 3


def auditable_units(state: TrainingState) -> list[AuditedUnit]:
    """Return the trained units that have exactly the trained parameters of a submodule, each with the innermost of
    these."""
    users: dict[int, set[str]] = {}
    for name, module in state.module.named_modules():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), set()).add(name)
    trained = {id(p) for unit in state.partition.units if unit.plan.trainable for p in unit.parameters}
    found = []
    for unit in state.partition.units:
        owners = set().union(*(users.get(id(p), set()) for p in unit.parameters)) if unit.plan.trainable else set()
        name = _common_ancestor(sorted(owners)) if owners else ""
        if name:
            module = state.module.get_submodule(name)
            if {id(p) for p in module.parameters()} & trained == {id(p) for p in unit.parameters}:
                found.append(AuditedUnit(unit, module))
    return found


def _common_ancestor(names: Sequence[str]) -> str:
    """Return the name of the innermost module that contains all modules ``names``, at least one; "" for the model."""
    split = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, split))


def repeatable(recorder: CallRecorder, loss: torch.Tensor, state: TrainingState) -> dict[int, Recomputation]:
    """Return, by unit index, the recomputations of recorded calls that are possible after the backward pass of
    ``loss``. Refuses modules (`ModuleRecorder.refuse`) whose gradient does not come from the recorded call alone."""
    graph, found = LossGraph(loss), {}
    for unit, module in recorder.modules.items():
        if module.call is not None:
            leaves = graph.leaves(module.call.outputs, module.call.inputs, module.candidate.unit.parameters)
            if isinstance(leaves, str):
                module.refuse(leaves)
            else:
                found[unit] = Recomputation(module.candidate, module.call, leaves, state)
    return found


class Recomputation:
    """Keeps one unit's gradient in one backward pass, and computes it again afterwards.

    [Note: repeated gradients] A unit's gradient is compared only if it comes from one call of its module alone, through
    ``leaves`` (`LossGraph.leaves`). Kept are the gradients of the call's outputs, after the user's hooks on them, and
    the unit's gradient buffer, which must have been empty. The repeated call gets the arguments and settings of the
    first. If it differs, it is repeated further. A module that raises, or whose repetitions differ too, is refused.

    Attributes:
        obstacle: why nothing was compared; None if it was."""

    def __init__(self, candidate: AuditedUnit, call: ModuleCall, leaves: Sequence[Node], state: TrainingState) -> None:
        self.unit = candidate.unit
        self.obstacle: str | None = None
        self._module = candidate.module
        self._call = call
        self._leaves = leaves
        self._state = state
        self._gradients = state.partition.runtime.gradients[self.unit.index]
        self._came_back: dict[int, tuple[torch.Tensor, int]] = {}
        self._taken: torch.Tensor | None = None
        self._present: Sequence[bool] = ()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Keep, in the block, the gradients of the call's outputs, and the unit's gradient before it is reduced or, if
        it is not, at the end of the block."""
        hooks = [*self._hook_outputs(), *self._hook_leaves()]
        self._gradients.watches.append(self._keep_gradient)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._gradients.watches.remove(self._keep_gradient)
            if self._taken is None:
                self._gradients.show(self._keep_gradient)

    def differences(self) -> list[str]:
        """Compute the gradient again, with the module gathered; return the names of the parameters whose gradients
        differ. If any rank cannot, return an empty list and set `obstacle`. Collective."""
        if self.obstacle is None and self._taken is None:
            self.obstacle = "no gradient arrived"
        if any(gradient._version != version for gradient, version in self._came_back.values()):
            self.obstacle = "what came back to its module was written in place"
        self.obstacle = self.obstacle or self._call.changed(self._module)
        parts = self._state.partition
        answers = parts.runtime.agree("audit", self.unit.name, self.obstacle is None)
        if not all(answers):
            self.obstacle = self.obstacle or "another rank cannot repeat it"
            return []
        with gathered(parts, list(self._module.parameters()), read_only=True):
            again = self._compute()
            found = [] if again is None else self._differing(again)
            for _ in range(_REPEATS if found and again is not None else 0):
                if not _are_same(again, self._compute()):
                    self.obstacle = "its module computes something else each time"
                    return []
        return found

    def _differing(self, again: Sequence[torch.Tensor | None]) -> list[str]:
        """Return the names of the parameters whose kept gradient differs from the repeated one in ``again`` (None where
        unused)."""
        found, taken = [], self._taken
        for entry, gradient, present in zip(self.unit.layout.entries, again, self._present, strict=True):
            if taken is not None and gradient is not None and present:
                if not same_bits(taken[entry.offset : entry.end], gradient.to(taken.dtype).flatten()):
                    found.append(entry.name)
        return found

    def _compute(self) -> list[torch.Tensor | None] | None:
        """Return the gradient of each parameter (None where unused) from a repeated call; None, with `obstacle` set, if
        that fails. The random generators are restored."""
        runtime, now = self._state.partition.runtime, RngState().state_dict()
        runtime.pause()
        try:
            outputs = self._call.repeat(self._module, self._state.device)
            if isinstance(outputs, str):
                self.obstacle = outputs
                return None
            ends = [outputs[place] for place in self._came_back]
            came_back = [gradient for gradient, _ in self._came_back.values()]
            computed = torch.autograd.grad(ends, self.unit.parameters, came_back, allow_unused=True)
            return [g if g is None or g.layout == torch.strided else g.to_dense() for g in computed]
        except Exception as failure:
            self.obstacle = f"its module cannot be called again: {type(failure).__name__}: {failure}"
            return None
        finally:
            RngState().load_state_dict(now)
            runtime.resume()

    def _hook_outputs(self) -> Iterator[RemovableHandle]:
        """Register hooks that keep the gradients of the call's outputs in a backward pass; yield their handles."""
        places: dict[Node, list[tuple[int, int]]] = {}
        for (node, number), place in self._call.outputs.items():
            places.setdefault(node, []).append((number, place))
        for node, its in places.items():
            yield node.register_prehook(partial(self._keep_output, its))

    def _hook_leaves(self) -> Iterator[RemovableHandle]:
        """Register hooks that set `obstacle` where a parameter had a gradient before; yield their handles."""
        held = {id(p): number for number, p in enumerate(self.unit.parameters)}
        for leaf in self._leaves:
            yield leaf.register_prehook(partial(self._check_first, held[id(leaf.variable)]))  # type: ignore[attr-defined]

    def _keep_output(self, places: Sequence[tuple[int, int]], gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradients of one node's outputs, or set `obstacle` for the second ones. ``places``: for each output
        its number at the node and its index among the call's."""
        for number, place in places:
            gradient = gradients[number]
            if place in self._came_back:
                self.obstacle = "gradients came back to its module's outputs several times"
            elif gradient is not None:
                self._came_back[place] = gradient, gradient._version

    def _check_first(self, number: int, _gradients: Sequence[torch.Tensor | None]) -> None:
        """Set `obstacle` if the unit's parameter ``number`` has got a gradient before. A hook on its leaf node."""
        if self._taken is not None or self._gradients.present[number]:
            self.obstacle = "its weights got gradients before, or from a backward pass inside this one"

    def _keep_gradient(self, flat: torch.Tensor, present: Sequence[bool]) -> None:
        """Keep a copy of the unit's gradient buffer ``flat``, and which parameters are ``present`` in it; only once."""
        if self._taken is None:
            self._taken, self._present = flat.clone(), present


def _are_same(ours: Sequence[torch.Tensor | None] | None, theirs: Sequence[torch.Tensor | None] | None) -> bool:
    """Return whether two lists of gradients have the same bytes, None matching None; false if a list is None."""
    if ours is None or theirs is None:
        return False
    return all(a is b if a is None or b is None else same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
