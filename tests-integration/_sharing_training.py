"""One rank of a job on two nodes that trains a transformer in several ways and says what that put on the wire.

KIND STEPS WAY,WAY,…: a `transformer` or `wide` layers; the ways take their steps in turn. The first rank prints JSON:
for every way, bytes between the nodes in one step, by the ledgers and by the kernel, and the seconds of each step.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from _wire_training import Transformer
from torch import nn
from torch.nn import functional
from two_nodes import sent_over_the_wire

import zero_core

QWZ = {"zero_quantized_weights": True}
HPZ = {"zero_hpz_partition_size": 2}
QGZ = {"zero_quantized_gradients": True}
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "qwZ": QWZ, "hpZ": HPZ, "qgZ": QGZ, "ZeRO++": {**QWZ, **HPZ, **QGZ}}
WARM_UP = 2


class Wide(nn.Module):
    """Few operations for many weights: training it is sending them."""

    def __init__(self, width: int = 1024, layers: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.width = width

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.one_hot(tokens.flatten()[:8], self.width).to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = x + functional.silu(layer(x)).view(8, 2, self.width).mean(1)
        return x.float().square().mean()


def make_engine(model: nn.Module, zero: dict[str, Any]) -> zero_core.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    return zero_core.initialize(model=model, config=config)[0]


class Way:
    """One engine and what its steps put on the wire."""

    def __init__(self, model: nn.Module, zero: dict[str, Any]) -> None:
        self.engine = make_engine(model, zero)
        self.forget()

    def forget(self) -> None:
        """Begin to count again."""
        self.parts: dict[str, int] = dict.fromkeys(("forward", "backward", "reduce", "all"), 0)
        self.kernel = 0
        self.seconds: list[float] = []
        self.open_waited = (0.0, 0.0)

    def step(self, number: int) -> None:
        """One step; every rank's bytes are on the wire when it returns."""
        ledger, generator = self.engine.ledger, torch.Generator().manual_seed(100 * number + dist.get_rank())
        dist.barrier()
        ledger.reset()
        sent, began = sent_over_the_wire(), time.perf_counter()
        loss = self.engine(torch.randint(256, (2, 16), generator=generator))
        forward = ledger.across_bytes("gather")
        self.engine.backward(loss)
        backward = ledger.across_bytes("gather") - forward
        self.engine.step()
        self.seconds.append(time.perf_counter() - began)
        dist.barrier()
        self.kernel += sent_over_the_wire() - sent
        counted = (forward, backward, ledger.across_bytes("reduce"), ledger.across_bytes())
        for part, nbytes in zip(self.parts, counted, strict=True):
            self.parts[part] += nbytes
        seconds = ledger.seconds("gather", "reduce", "publish")
        self.open_waited = (self.open_waited[0] + seconds[0], self.open_waited[1] + seconds[1])
        self.loss = float(loss)

    def found(self) -> dict[str, Any]:
        """Per step: bytes that the first node sent to the other, by part and by the kernel's count; all seconds."""
        steps = len(self.seconds)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, self.parts)
        node = everybody[: len(everybody) // 2]
        open_, waited = self.open_waited
        return {
            **{part: sum(parts[part] for parts in node) / steps for part in self.parts},
            "kernel": self.kernel / steps,
            "seconds": self.seconds,
            "hidden": 1 - waited / open_,
            "loss": self.loss,
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kind, steps, names = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
    ways: dict[str, Way] = {}
    for name in names:
        torch.manual_seed(0)
        model = Wide() if kind == "wide" else Transformer()
        elements = sum(p.numel() for p in model.parameters())
        ways[name] = Way(model, WAYS[name])
    for number in range(WARM_UP + steps):
        for way in ways.values():
            if number == WARM_UP:
                way.forget()
            way.step(number)
    measured = {name: way.found() for name, way in ways.items()}
    for way in ways.values():
        way.engine.destroy()
    if dist.get_rank() == 0:
        print(json.dumps({"elements": elements, "ways": measured}))
    dist.destroy_process_group()
