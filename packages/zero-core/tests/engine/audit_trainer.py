"""The loop with which scripts are run with and without `audit_every`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_core

STEPS = 3
Script = Callable[["Trainer"], None]
SCRIPTS: dict[str, Script] = {}


class Trainer:
    """What a script trains with: `audited` or not, at one stage, dtype and tier.

    Attributes:
        repeated: for each step the unit whose gradient was computed again, or None.
        ends: the full weights that `run` has left.
    """

    def __init__(self, audited: bool, stage: int, dtype: str, tier: str) -> None:
        self.repeated: list[str | None] = []
        self.ends: list[torch.Tensor] = []
        self._audited = audited
        self._dtype = dtype
        self._section: dict[str, Any] = {"stage": stage, "unit_min_numel": 1, "stage3_param_persistence_threshold": 0}
        if tier == "cpu":
            self._section["offload_optimizer"] = {"device": "cpu"}
            if stage == 3:
                self._section["offload_param"] = {"device": "cpu"}
        self._engines: list[zero_core.Engine] = []

    def start(self, model: nn.Module, **changes: Any) -> zero_core.Engine:
        dtype = {"bf16": {"enabled": True}} if self._dtype == "bf16" else {"data_types": {"param_dtype": self._dtype}}
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": self._section,
            **({"audit_every": 1} if self._audited else {}),
            **dtype,
            **changes,
        }
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.9)
        engine = zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]
        self._engines.append(engine)
        return engine

    def x(self, step: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        found = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
        return found.to(torch.bfloat16) if self._dtype == "bf16" else found

    def finish(self, engine: zero_core.Engine, loss: torch.Tensor) -> None:
        engine.backward(loss)
        self.step(engine)

    def step(self, engine: zero_core.Engine) -> None:
        before, steps = getattr(engine.audit, "_chosen", None), engine.global_steps
        engine.step()
        if self._audited and engine.global_steps > steps:
            self.repeated.append(None if before is None or before.obstacle is not None else before.unit.name)

    def loop(self, model: nn.Module, loss: Callable[..., torch.Tensor] | None = None, **changes: Any) -> None:
        engine = self.start(model, **changes)
        for number in range(STEPS):
            x = self.x(number, 5)
            self.finish(engine, engine(x).pow(2).mean() if loss is None else loss(engine, x))

    def close(self) -> None:
        for engine in self._engines:
            self.ends += [engine.full_param(p).clone() for p in engine.module.parameters()]
            engine.destroy()


def script(run_one: Script) -> Script:
    SCRIPTS[run_one.__name__] = run_one
    return run_one


def mlp(*widths: int) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Calls(nn.Module):
    """Calls what it is given with an inner module."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner
        self.call = call

    def forward(self, *arguments: Any) -> Any:
        return self.call(self.inner, *arguments)
