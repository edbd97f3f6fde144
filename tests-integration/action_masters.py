"""A case in bfloat16 with plain torch: one process, float32 masters under the optimizer, the ranks' batches by turns.

What it computes is written in docs/numerics.md: each rank's gradients are those of its own batch, in bfloat16; they are
added in float32 in rank order and divided once, micro-batches add up in float32, and weights are the masters, rounded.
Nothing of the engine is in it. Where a case has a tier its optimizer is the class with the tiers' kernels, over full
tensors, as torch.optim rounds otherwise, and a weight that rounds otherwise is soon another run.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from action_cases import batch, build, groups_of, optimizer_over, parameter_number
from action_runs import Plain, freeze_listed, states_of
from torch import nn


class PlainMasters(Plain):
    """One process that computes what the ranks compute, gradients and masters included."""

    def __post_init__(self) -> None:
        self.ranks = dist.get_world_size()
        self.model = build(self.case)
        groups = groups_of(self.case, self.model)
        self.masters = {p: nn.Parameter(p.detach().float()) for group in groups for p in group["params"]}
        over = [{**group, "params": [self.masters[p] for p in group["params"]]} for group in groups]
        self.optimizer = optimizer_over(self.case, over, kernels=self.case.on_a_tier)
        self.averages: dict[nn.Parameter, torch.Tensor] = {}
        self.shown: dict[nn.Parameter, torch.Tensor] = {}
        self.slots: dict[int | str, Any] = {}
        freeze_listed(self.case, self.model)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def forward(self, number: int) -> list[torch.Tensor]:  # type: ignore[override]
        """The loss of each rank."""
        return [self.model(*batch(self.case, number, rank, self.ranks)) for rank in range(self.ranks)]

    def backward(self, losses: list[torch.Tensor]) -> None:  # type: ignore[override]
        by_rank = []
        for loss in losses:
            for p in self.masters:
                p.grad = None
            (loss.float() / self.case.accumulation).backward()
            by_rank.append({p: p.grad.float() for p in self.masters if p.grad is not None})
        for p in self.masters:
            parts = [gradients[p] for gradients in by_rank if p in gradients]
            if parts:
                total = parts[0].clone()
                for part in parts[1:]:
                    total += part
                total /= self.ranks
                self.averages[p] = self.averages[p] + total if p in self.averages else total
        self._show()

    def penalised(self, losses: list[torch.Tensor], number: int) -> list[torch.Tensor]:  # type: ignore[override]
        return [Plain.penalised(self, loss, number) for loss in losses]

    def _show(self) -> None:
        """Make the averages, rounded, the parameters' ``.grad``."""
        for p in self.masters:
            p.grad = self.averages[p].to(p.dtype) if p in self.averages else None
        self.shown = {p: p.grad for p in self.averages if p.grad is not None}

    def _take(self) -> None:
        """Use what was written to ``.grad``: elements that were changed in place; all of another tensor."""
        for p in self.masters:
            if p.grad is None:
                self.averages.pop(p, None)
            elif p.grad is self.shown.get(p):
                average = self.averages[p]
                self.averages[p] = torch.where(average.to(p.dtype) != p.grad, p.grad.float(), average)
            else:
                self.averages[p] = p.grad.float()

    def discard(self, how: str, *, set_to_none: bool = True) -> None:
        (self.model if how != "optimizer" else self).zero_grad(set_to_none)
        self._take()
        self._show()

    def zero_grad(self, set_to_none: bool) -> None:
        """As the optimizer's, of the parameters it has masters of."""
        for p in self.masters:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def halve_gradient(self, number: int) -> None:
        p = parameter_number(self.model, number)
        self._take()
        if p in self.averages:
            self.averages[p] *= 0.5
        self._show()

    def clip(self, how: str, bound: float) -> None:
        if how != "engine":
            super().clip(how, bound)
            return
        self._take()
        squares = (float(g.double().square().sum()) for g in self.averages.values())
        factor = min(1.0, bound / (math.sqrt(sum(squares)) + 1e-6))
        for gradient in self.averages.values():
            gradient *= factor
        self._show()

    # -- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, boundary: bool) -> None:
        if not boundary:
            return
        self._take()
        for p, master in self.masters.items():
            master.grad = self.averages.get(p)
        self.optimizer.step()
        for p, master in self.masters.items():
            p.copy_(master)
        self.zero_grad(True)
        self._take()

    @torch.no_grad()
    def write(self, how: str, number: int, value: torch.Tensor) -> None:
        super().write(how, number, value.to(self.case.dtype))
        for p, master in self.masters.items():
            master.copy_(torch.where(master.to(p.dtype) != p, p.float(), master))
        written = parameter_number(self.model, number)
        if how == "set_full_param" and written in self.masters:
            self.masters[written].copy_(written)

    @torch.no_grad()
    def save(self, slot: int | str) -> None:
        masters = [master.detach().clone() for master in self.masters.values()]
        self.slots[slot] = copy.deepcopy((self.model.state_dict(), masters, self.optimizer.state_dict()))

    @torch.no_grad()
    def load(self, slot: int | str) -> None:
        weights, masters, states = copy.deepcopy(self.slots[slot])
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(states)
        for master, saved in zip(self.masters.values(), masters, strict=True):
            master.copy_(saved)
        self.discard("model")

    def weights(self) -> dict[str, torch.Tensor]:
        """The masters, and the parameters that have none."""
        return {name: self.masters.get(p, p).detach().clone() for name, p in self.model.named_parameters()}

    def published(self) -> dict[str, torch.Tensor]:
        return Plain.weights(self)

    def states(self) -> dict[str, torch.Tensor]:
        names = {self.masters.get(p, p): name for name, p in self.model.named_parameters()}
        return states_of(self.case, self.optimizer, {id(p): name for p, name in names.items()})
