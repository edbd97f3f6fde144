"""Training loops in which the user's own code touches gradients: run by plain torch and by the engine alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import training
import zoo
from torch import nn
from training import DTYPES, LR, Run


class Plain:
    """One process, torch.optim, the whole batch; bfloat16 weights have float32 masters, as mixed precision has."""

    def __init__(self, run: Run, model: nn.Module | None = None) -> None:
        self.module = (
            model
            if model is not None
            else zoo.build(run.variant, torch.float32 if run.dtype == "bf16" else DTYPES[run.dtype])
        )
        self.accumulation = run.accumulation
        self._masters = list(self.module.parameters())
        self._low = None
        if run.dtype == "bf16":
            self._masters = [nn.Parameter(p.detach().clone()) for p in self.module.parameters()]
            self.module.to(torch.bfloat16)
        self._inner = torch.optim.AdamW(self._masters, lr=LR, weight_decay=0.01)
        self.optimizer = self.module  # zero_grad is all that scripts ask of it

    def loss(self, step: int, micro: int = 0) -> torch.Tensor:
        return sum(self.module(*zoo.batch(step, micro)))  # type: ignore[return-value]

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulation).backward()

    def step(self) -> None:
        for p, master in zip(self.module.parameters(), self._masters, strict=True):
            if p is not master:
                master.grad = None if p.grad is None else p.grad.to(master.dtype)
        self._inner.step()
        self._inner.zero_grad()
        for p, master in zip(self.module.parameters(), self._masters, strict=True):
            if p is not master:
                p.data.copy_(master.detach())
        self.module.zero_grad()

    def micro_step(self) -> None:
        """Nothing happens between the micro-batches of a step."""

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: m.detach().clone() for (n, _), m in zip(self.module.named_parameters(), self._masters, strict=True)}


class Ours:
    """The engine on this rank, with its rows of the batch."""

    def __init__(self, run: Run, stage: int, **zero: Any) -> None:
        self.engine = training.start(run, stage, **zero)
        self.module, self.optimizer = self.engine.module, self.engine.optimizer
        self.accumulation = run.accumulation
        self.step = self.micro_step = self.engine.step

    def loss(self, step: int, micro: int = 0) -> torch.Tensor:
        return sum(self.engine(*zoo.batch(step, micro, dist.get_rank(), dist.get_world_size())))  # type: ignore[return-value]

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def weights(self) -> dict[str, torch.Tensor]:
        return training.weights(self.engine)


# -- scripts: what plain torch makes of them is what every stage makes of them ---------------------------------------


def skips_a_bad_batch(t: Any) -> None:
    """The gradients of one batch are thrown away by the optimizer, those of another by the model."""
    for number in range(5):
        t.backward(t.loss(number))
        if number == 1:
            t.optimizer.zero_grad()
            continue
        if number == 3:
            t.module.zero_grad()
            continue
        t.step()


def zeroes_between_forward_and_backward(t: Any) -> None:
    t.backward(t.loss(9))
    for number in range(3):
        loss = t.loss(number)
        t.optimizer.zero_grad()
        t.backward(loss)
        t.step()


def zeroes_a_part(t: Any) -> None:
    """What has no gradient any more is not decayed either."""
    for number in range(3):
        t.backward(t.loss(number))
        t.module.blocks[number].zero_grad()
        if number == 2:
            t.module.norm.zero_grad()
        t.step()


def keeps_zeros(t: Any) -> None:
    """Zeros instead of no gradients: moments decay, and weights too."""
    for number in range(4):
        t.backward(t.loss(number))
        if number == 1:
            t.optimizer.zero_grad(set_to_none=False)
        if number == 2:
            t.module.blocks[1].zero_grad(set_to_none=False)
        t.step()


def assigns_gradients(t: Any) -> None:
    """Combines two losses' gradients by hand; some parameters get none."""
    parameters = list(t.module.parameters())
    for number in range(3):
        first = torch.autograd.grad(t.loss(number), parameters)
        second = torch.autograd.grad(t.loss(number, 1), parameters)
        for index, (p, a, b) in enumerate(zip(parameters, first, second, strict=True)):
            if index % 4:
                p.grad = a * 0.5 + b
        t.step()


def replaces_gradients(t: Any) -> None:
    """What backward gave is replaced, for some parameters."""
    for number in range(3):
        t.backward(t.loss(number))
        for index, p in enumerate(t.module.parameters()):
            if index % 3 == number:
                p.grad = torch.full_like(p, 0.01 * (index + 1), memory_format=torch.contiguous_format)
        t.step()


def adds_to_assigned_gradients(t: Any) -> None:
    """A regulariser's gradient is there before backward adds to it, and forward runs in between."""
    for number in range(3):
        for index, p in enumerate(t.module.parameters()):
            if index % 2:
                p.grad = torch.full_like(p, 0.02, memory_format=torch.contiguous_format)
        t.backward(t.loss(number))
        t.step()


def replaces_within_an_accumulation(t: Any) -> None:
    """Two micro-batches; between them some gradients are replaced, others are dropped."""
    for number in range(3):
        t.backward(t.loss(number))
        for index, p in enumerate(t.module.parameters()):
            if index % 3 == number:
                p.grad = torch.full_like(p, 0.01 * (index + 1), memory_format=torch.contiguous_format)
        t.module.blocks[number].zero_grad()
        t.micro_step()
        t.backward(t.loss(number, 1))
        t.step()


EVERY_STAGE = [
    skips_a_bad_batch,
    zeroes_between_forward_and_backward,
    zeroes_a_part,
    keeps_zeros,
    assigns_gradients,
    replaces_gradients,
    adds_to_assigned_gradients,
]


def clips_the_norm(t: Any) -> None:
    for number in range(3):
        t.backward(t.loss(number))
        torch.nn.utils.clip_grad_norm_(t.module.parameters(), 0.1)
        t.step()


def clips_values(t: Any) -> None:
    for number in range(3):
        t.backward(t.loss(number))
        torch.nn.utils.clip_grad_value_(t.module.parameters(), 0.01)
        t.step()


def edits_gradients(t: Any) -> None:
    """In place, by assignment, and by taking them away (DINO's last layer)."""
    for number in range(3):
        t.backward(t.loss(number))
        for index, p in enumerate(t.module.parameters()):
            if index % 4 == 0:
                p.grad.mul_(0.5)
            elif index % 4 == 1:
                p.grad = p.grad * 2
            elif index % 4 == 2:
                p.grad = None
        t.step()


def edits_within_an_accumulation(t: Any) -> None:
    """After the first of two backward passes of a boundary, without a step in between."""
    for number in range(3):
        t.backward(t.loss(number))
        for p in t.module.parameters():
            p.grad.mul_(0.25)
        t.backward(t.loss(number, 1))
        t.step()


WHERE_GRADIENTS_SHOW = [clips_the_norm, clips_values, edits_gradients, edits_within_an_accumulation]
