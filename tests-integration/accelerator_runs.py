"""Engines on a real accelerator, several ranks on one device: messages go through host memory, by gloo."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import simulated_engines as engines
import torch
import torch.distributed as dist
from torch import nn

DEVICE = "cuda:0"


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    """The tokens of a rank, this one by default."""
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randint(0, engines.TOKENS, (4, 6), generator=generator).to(DEVICE)


def made(settings: dict[str, Any], optimizer: Callable[..., torch.optim.Optimizer] | None = None, **kw: Any) -> Any:
    """An engine on the device; ``optimizer`` and its keywords: of the script's own."""
    import zero_core

    torch.manual_seed(0)
    model = engines.Model()
    given = None if optimizer is None else optimizer(model.parameters(), lr=1e-3, **kw)
    return zero_core.initialize(model=model, optimizer=given, config=settings, device=DEVICE)[0]


def steps(engine: Any, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = engine(batch(number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def whole(engine: Any) -> dict[str, torch.Tensor]:
    return {
        name: (engine.full_param(p) if engine.partition.find(p) else p.detach()).cpu()
        for name, p in engine.module.named_parameters()
    }


def trained(settings: dict[str, Any], count: int = 6) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return this rank's losses and the whole weights, in the optimizer's precision."""
    engine = made(settings)
    losses = steps(engine, range(count))
    weights = whole(engine)
    engine.destroy()
    return losses, weights


def trained_plainly(dtype: str, clip: float, count: int = 6) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same with torch alone on the device, on the batch of all ranks; in bf16 with weights rounded each step."""
    torch.manual_seed(0)
    masters = engines.Model().to(DEVICE)
    model = masters if dtype == "fp32" else engines.Model().to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for step in range(count):
        with torch.no_grad():
            for low, high in zip(model.parameters(), masters.parameters(), strict=True):
                if low is not high:
                    low.copy_(high)
        sums = [torch.zeros_like(p) for p in masters.parameters()]
        for rank in range(dist.get_world_size()):
            loss = model(batch(step, rank))
            model.zero_grad()
            loss.backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad / dist.get_world_size()
            if rank == dist.get_rank():
                losses.append(float(loss.detach()))
        for p, total in zip(masters.parameters(), sums, strict=True):
            p.grad = total
        torch.nn.utils.clip_grad_norm_(masters.parameters(), clip)
        optimizer.step()
    return losses, {name: p.detach().cpu() for name, p in masters.named_parameters()}


def resumed(settings: dict[str, Any], keyword: str, folder: str) -> list[list[float]]:
    """Return the losses after a checkpoint, of the engine that wrote it and of one that loads it."""
    found = []
    for loads in (False, True):
        engine = made(settings, torch.optim.AdamW, **{keyword: True})
        if loads:
            engine.load_checkpoint(folder)
        else:
            steps(engine, range(2))
            engine.save_checkpoint(folder)
        found.append(steps(engine, range(2, 4)))
        engine.destroy()
    return found


def written(settings: dict[str, Any], folder: str) -> list[float]:
    """Save after two steps; return the losses of the next two."""
    engine = made(settings)
    steps(engine, range(2))
    engine.save_checkpoint(folder)
    losses = steps(engine, range(2, 4))
    engine.destroy()
    return losses


def read(settings: dict[str, Any], folder: str) -> list[float]:
    """Load a checkpoint; return the losses of the next two steps."""
    engine = made(settings)
    engine.load_checkpoint(folder)
    losses = steps(engine, range(2, 4))
    engine.destroy()
    return losses


def stops_by_step(settings: dict[str, Any], numbers: range) -> list[dict[str, int]]:
    """Return the lines that made the host wait for the device in each of the steps, as torch reports them."""
    engine = made(settings)
    steps(engine, range(numbers.start))
    found = []
    for number in numbers:
        tokens = batch(number)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.backward(engine(tokens))
                engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        stops = [w for w in said if "called a synchronizing" in str(w.message)]
        found.append(dict(Counter(f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in stops)))
    engine.destroy()
    return found


def overflowing(settings: dict[str, Any], scale: float) -> tuple[list[int], bool, int, str]:
    """Take six steps, number 3 with gradients that are not finite on the last rank. Return the steps that raised,
    whether step 3 left the weights alone, the steps skipped and the last error."""
    import zero_partition

    engine = made(settings)
    raised, message, alone = [], "", False
    for number in range(6):
        before = whole(engine) if number == 3 else {}
        loss = engine(batch(number))
        bad = number == 3 and dist.get_rank() == dist.get_world_size() - 1
        engine.backward(loss * scale if bad else loss)
        try:
            engine.step()
            if number == 3:
                after = whole(engine)
                alone = all(torch.equal(before[name], after[name]) for name in before)
        except zero_partition.NonFiniteGradientError as error:
            raised.append(number)
            message = str(error)
            break
    skipped = engine.skipped_steps
    engine.destroy()
    return raised, alone, skipped, message


def memory_over(settings: dict[str, Any], count: int) -> tuple[list[int], int]:
    """Return the bytes that tensors take after each step, and the allocator's retries."""
    engine = made(settings)
    found = []
    for number in range(count):
        steps(engine, range(number, number + 1))
        found.append(torch.cuda.memory_allocated())
    engine.destroy()
    return found, torch.cuda.memory_stats()["num_alloc_retries"]


class Failing(nn.Module):
    """A model whose last rank raises in forward or backward at step 2."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where, self.step = engines.Model(), where, 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.step += 1
        loss: torch.Tensor = self.inner(tokens)
        if self.step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            if self.where == "forward":
                raise ValueError("planted in forward")
            loss.register_hook(self._fail)
        return loss

    def _fail(self, _: torch.Tensor) -> None:
        raise ValueError("planted in backward")


def failed(settings: dict[str, Any], where: str) -> tuple[str, float]:
    """Return the error of a step in which the last rank raises, and the seconds until it came."""
    import time

    import zero_core

    torch.manual_seed(0)
    engine = zero_core.initialize(model=Failing(where), config=settings, device=DEVICE)[0]
    began = time.monotonic()
    try:
        for number in range(4):
            began = time.monotonic()
            engine.backward(engine(batch(number)))
            engine.step()
    except Exception as error:  # every kind is told
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing was raised", 0.0


def saved_activations(settings: dict[str, Any]) -> list[float]:
    """Return the losses with activation checkpointing of the engine's own."""
    import zero_core
    from zero_core import checkpointing

    class Checkpointed(engines.Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens) * self.scale + self.shift
            for block in self.blocks:
                x = checkpointing.checkpoint(block, x)
            return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())

    torch.manual_seed(0)
    engine = zero_core.initialize(model=Checkpointed(), config=settings, device=DEVICE)[0]
    losses = steps(engine, range(4))
    engine.destroy()
    return losses
