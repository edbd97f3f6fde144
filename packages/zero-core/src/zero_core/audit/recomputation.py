"""One unit's work done a second time: the reductions of a step, the gradient of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from zero_ckpt.torch import RngState
from zero_partition import Unit, UnitGradients, gathered

from ..state import TrainingState
from .digests import same_bits


class RepeatedReductions:
    """Sends what one unit's reductions have sent once more, and compares the averages, after each backward pass.

    What lies between a rank's own gradient and the shard that the optimizer reads is the wire and a sum. Both are
    repeated from a copy that was taken before the first went out.
    """

    def __init__(self, gradients: UnitGradients, rank: int) -> None:
        self.differences: list[str] = []
        self._gradients = gradients
        self._rank = rank
        self._tree = None if gradients.leaves is None else gradients.leaves.empty()

    @contextmanager
    def backward(self, step: int) -> Iterator[None]:
        """A context around a backward pass; compares behind it. Collective."""
        gradients = self._gradients
        average = self._present() if self._tree is None and gradients.is_reduced else None
        sent: list[torch.Tensor] = []

        def keep(flat: torch.Tensor, _present: Sequence[bool]) -> None:
            sent.append(flat.clone())

        gradients.watches.append(keep)
        try:
            yield
        finally:
            gradients.watches.remove(keep)
        for flat in sent:
            if self._tree is None:
                average = gradients.reduce_again(flat, average, step)
            else:
                average = self._tree.add(gradients.reduce_again(flat, None, step))
        if sent and average is not None:
            self._compare(average)

    def _present(self) -> torch.Tensor:
        with self._gradients.averaged() as averaged:
            return averaged.clone()

    def _compare(self, again: torch.Tensor) -> None:
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


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class AuditedUnit:
    """A unit whose parameters are those of one module's subtree, and used nowhere else."""

    def __init__(self, unit: Unit, module: nn.Module) -> None:
        self.unit = unit
        self.module = module


def candidates(state: TrainingState) -> list[AuditedUnit]:
    """The trained units whose gradient can be computed again at the cost of one of several modules."""
    users: dict[int, set[str]] = {}
    for name, module in state.module.named_modules():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), set()).add(name)
    found = []
    for unit in state.partition.units:
        owners = set().union(*(users.get(id(p), set()) for p in unit.parameters)) if unit.plan.trainable else set()
        name = _common(sorted(owners)) if owners else ""
        if name:
            module = state.module.get_submodule(name)
            if {id(p) for p in module.parameters()} == {id(p) for p in unit.parameters}:
                found.append(AuditedUnit(unit, module))
    return found


def _common(names: Sequence[str]) -> str:
    first, last = names[0].split("."), names[-1].split(".")
    shared = [a for a, b in zip(first, last, strict=False) if a == b]
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(shared))
    return ".".join(first[:same])


class Recomputation:
    """Watches one micro-batch of one unit: what its module got, what came back, and what was about to travel.

    Between `watch` and `differences` there is one forward and one backward pass. Not every call can be repeated: where
    the module is called several times, gets or returns objects, or writes buffers, nothing is compared.
    """

    def __init__(self, candidate: AuditedUnit, state: TrainingState) -> None:
        self.unit = candidate.unit
        self._module = candidate.module
        self._state = state
        self._calls = 0
        self._arguments: tuple[Any, ...] | None = None
        self._random: dict[str, Any] = {}
        self._buffers: list[tuple[torch.Tensor, int]] = []
        self._output: Any = None
        self._came_back: dict[int, torch.Tensor] = {}
        self._taken: torch.Tensor | None = None
        self._present: Sequence[bool] = ()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Watch the module's calls inside."""
        before = self._module.register_forward_pre_hook(self._before, with_kwargs=True)
        after = self._module.register_forward_hook(self._after)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Keep what the unit's gradients are before they travel."""
        gradients = self._state.partition.runtime.gradients[self.unit.index]
        gradients.watches.append(self._take)
        try:
            yield
        finally:
            gradients.watches.remove(self._take)
            if self._taken is None:
                gradients.show(self._take)

    def differences(self) -> list[str]:
        """The parameters whose gradient is another when it is computed again. Collective."""
        repeatable = self._calls == 1 and self._arguments is not None and self._taken is not None
        repeatable = repeatable and len(self._came_back) == len(self._outputs())
        repeatable = repeatable and not self._state.compiled
        repeatable = repeatable and all(p.requires_grad for p in self.unit.parameters)
        repeatable = repeatable and all(b._version == version for b, version in self._buffers)
        answers = self._state.partition.runtime.agree("audit", self.unit.name, repeatable)
        if not all(answers):
            return []
        parameters = self.unit.parameters
        with gathered(self._state.partition, parameters):
            again = self._compute(parameters)
        found = []
        taken = self._taken
        for entry, gradient, present in zip(self.unit.layout.entries, again, self._present, strict=True):
            if taken is not None and gradient is not None and present:
                if not same_bits(taken[entry.offset : entry.end], gradient.to(taken.dtype).flatten()):
                    found.append(entry.name)
        return found

    def _compute(self, parameters: Sequence[nn.Parameter]) -> Sequence[torch.Tensor | None]:
        arguments, keywords = self._arguments or ((), {})
        runtime, now = self._state.partition.runtime, RngState().state_dict()
        runtime.pause()
        try:
            RngState().load_state_dict(self._random)
            with torch.enable_grad(), self._state.autocast():
                outputs = [t for t in tree_leaves(self._module(*arguments, **keywords)) if _requires_grad(t)]
            came_back = [self._came_back[number] for number in range(len(outputs))]
            return torch.autograd.grad(outputs, list(parameters), came_back, allow_unused=True)
        finally:
            RngState().load_state_dict(now)
            runtime.resume()

    def _outputs(self) -> list[torch.Tensor]:
        return [t for t in tree_leaves(self._output) if _requires_grad(t)]

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._calls += 1
        leaves = tree_leaves((arguments, keywords))
        if self._calls == 1 and all(isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves):
            self._arguments = tree_map(_copied, (arguments, keywords))
            self._random = RngState().state_dict()
            self._buffers = [(buffer, buffer._version) for buffer in module.buffers()]

    def _after(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if self._calls != 1:
            return
        self._output = output
        for number, tensor in enumerate(self._outputs()):
            tensor.register_hook(partial(self._keep, number))  # type: ignore[no-untyped-call]

    def _keep(self, number: int, gradient: torch.Tensor) -> None:
        self._came_back[number] = gradient.detach().clone()

    def _take(self, flat: torch.Tensor, present: Sequence[bool]) -> None:
        self._taken, self._present = flat.clone(), present


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)
