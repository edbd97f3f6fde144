"""Engines on the simulated accelerator with one share of the optimizer's states in host memory, the rest there."""

from __future__ import annotations

from typing import Any, NamedTuple

import simulated_engines as engines
import torch
from simulated_accelerator import Report, configure, settle, watch
from torch import nn


class Doubles(engines.Model):
    """A model whose every value is in float64."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class TwinRun(NamedTuple):
    """Losses, norms, full weights and moments, steps skipped, what was seen of each step, and the update's memory."""

    losses: list[float]
    norms: list[float]
    values: dict[str, torch.Tensor]
    skipped: int
    reports: list[Report]
    memory: dict[str, int]


MOMENTS = {torch.optim.SGD: ["momentum_buffer"], torch.optim.Adagrad: ["sum"], object: ["exp_avg", "exp_avg_sq"]}
CLIP = 0.5
"""Less than the norms of all steps."""


def config(stage: int, dtype: str, ratio: float | None, **more: Any) -> dict[str, Any]:
    """AdamW with ``ratio`` of its states in host memory, None for no offload; ``more``: other keys of the section."""
    zero = {} if ratio is None else {"offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": ratio}}
    settings = {**engines.config(stage, dtype, **zero, **more), "gradient_clipping": CLIP}
    if dtype == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
    return settings


def start(settings: dict[str, Any], optimizer: Any = None, *, double: bool = False) -> Any:
    import zero_core

    torch.manual_seed(0)
    model = Doubles().double() if double else engines.Model()
    given = None if optimizer is None else optimizer(model.parameters())
    return zero_core.initialize(model=model, optimizer=given, config=settings)[0]


def values(engine: Any) -> dict[str, torch.Tensor]:
    """Return full weights, masters' weights and moments, by name."""
    found = {}
    optimizer = engine.sharded_optimizer.inner
    kinds = next(kinds for kind, kinds in MOMENTS.items() if isinstance(optimizer, kind))
    for name, p in engine.module.named_parameters():
        found[name] = engine.full_param(p).cpu()
        for kind in kinds:
            found[f"{name}/{kind}"] = engine.full_state(p, kind).cpu()
    return found


def take(engine: Any, numbers: range, micro_batches: int = 1) -> tuple[list[float], list[float], list[Report]]:
    """Take steps; return losses, norms, and what was seen of each step."""
    losses, norms, reports = [], [], []
    for number in numbers:
        settle()
        with watch() as report:
            for micro in range(micro_batches):
                loss = engine(engines.batch(10 * number + micro, "sim"))
                engine.backward(loss)
                engine.step()
        reports.append(report)
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    return losses, norms, reports


def trained(
    settings: dict[str, Any], steps: int = 4, seed: int = 1, optimizer: Any = None, double: bool = False
) -> TwinRun:
    configure(seed=seed)
    engine = start(settings, optimizer, double=double)
    losses, norms, reports = take(engine, range(steps), settings.get("gradient_accumulation_steps", 1))
    update = engine.offloading.update
    memory = {} if update is None else dict(update.memory())
    run = TwinRun(losses, norms, values(engine), engine.skipped_steps, reports, memory)
    engine.destroy()
    return run


def refusal(settings: dict[str, Any]) -> str:
    """Return the error of `initialize`."""
    from zero_core import UsageError

    try:
        start(settings)
    except UsageError as error:
        return str(error)
    return "nothing was raised"


def resumed(settings: list[dict[str, Any]], folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Take two steps in float64 with each configuration, from the checkpoint of the one before it; return the losses
    and the last values."""
    losses: list[float] = []
    found: dict[str, torch.Tensor] = {}
    for number, one in enumerate(settings):
        engine = start(one, double=True)
        if number:
            engine.load_checkpoint(folder)
        losses += take(engine, range(2 * number, 2 * number + 2))[0]
        engine.save_checkpoint(folder)
        found = values(engine)
        engine.destroy()
    return losses, found


def edited(settings: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Read each full gradient, clip outside the step, and replace one gradient; return the norms of the gradients and
    the values after the step."""
    engine = start(settings)
    loss = engine(engines.batch(0, "sim"))
    engine.backward(loss)
    norms = [float(engine.full_grad(p).norm()) for p in engine.module.parameters()]
    norms.append(float(engine.clip_grad_norm_(0.25)))
    engine.set_full_grad(engine.module.head.weight, torch.ones(engines.TOKENS, engines.WIDTH))
    engine.step()
    found = values(engine)
    engine.destroy()
    return norms, found
