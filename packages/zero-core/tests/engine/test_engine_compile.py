"""torch.compile: one graph at stages 0 to 2, one per gathered module at stage 3, and the same weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from engine_cases import RANKS, STAGES, WIDTH, Net, adamw, batch, build, distance, outcome, plain, start, train, weights
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from zero_comm import run_ranks
from zero_partition.compat import TORCH

STEPS = 3
REGIONS = ["enter", "blocks.0", "blocks.1", "head"]
GRAPHS = 3 if TORCH == (2, 13) else 4
"""At stage 3, for all steps. With torch 2.13 the two blocks share a graph; with 2.8, 2.11 and 2.15 each has its own."""


class Tied(Net):
    """The head reads the first block's weight, which belongs to a unit that has run already."""

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.enter(x) + self.shift)
        for block in self.blocks:
            h = h + torch.tanh(block(h)) / 8
        return self.head(h @ self.blocks[0].weight / 8)


class Nested(Net):
    """Blocks are modules of modules, with a graph break in the middle of each."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 60), nn.Linear(60, WIDTH)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.up(h))
            torch._dynamo.graph_break()
            return self.down(h)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))


def made(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    return kind().double()


def compiled(stage: int, kind: type[Net], backend: str | None, fullgraph: bool) -> dict[str, Any]:
    """Train with ``backend``, or count graphs with one that runs them as they are."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(len(inputs))
        made: Callable[..., Any] = aot_eager(graph, inputs)
        return made

    engine = start(stage, made(kind))
    engine.compile(backend=backend or counting, compile_kwargs={"fullgraph": fullgraph})
    train(engine, 0, STEPS)
    return {"weights": weights(engine), "regions": engine.compiled_modules, "graphs": len(graphs)}


@pytest.mark.parametrize("stage", STAGES)
def test_a_compiled_engine_follows_the_oracle(stage: int) -> None:
    reference = made(Net)
    plain(reference, adamw(reference), 0, STEPS)
    for seen in run_ranks(compiled, RANKS, stage, Net, None, True):
        assert distance(seen["weights"], weights(reference)) <= 1e-12
        assert seen["regions"] == ([""] if stage < 3 else REGIONS)
        assert seen["graphs"] == (1 if stage < 3 else GRAPHS)


@pytest.mark.parametrize("kind", (Tied, Nested))
def test_awkward_models_compile_at_stage_3(kind: type[Net]) -> None:
    reference = made(kind)
    plain(reference, adamw(reference), 0, STEPS)
    for seen in run_ranks(compiled, RANKS, 3, kind, None, False):
        assert distance(seen["weights"], weights(reference)) <= 1e-12


@pytest.mark.parametrize("stage", (pytest.param(2, marks=pytest.mark.soak), 3))
def test_inductor_follows_the_oracle(stage: int) -> None:
    reference = made(Net)
    plain(reference, adamw(reference), 0, STEPS)
    for seen in run_ranks(compiled, RANKS, stage, Net, "inductor", True):
        assert distance(seen["weights"], weights(reference)) <= 1e-12


def life(stage: int) -> dict[str, Any]:
    torch._dynamo.reset()
    engine = start(stage)
    seen: dict[str, Any] = {"before": engine.is_compiled}
    engine.compile(backend="eager")
    seen["after"] = engine.is_compiled
    train(engine, 0, 1)
    with torch.no_grad():
        seen["evaluated"] = engine(*batch(1)).item()
    with engine.gathered(engine.module.parameters()):
        copied = copy.deepcopy(engine.module)
        loaded = pickle.loads(pickle.dumps(engine.module))
    direct = engine.module(*batch(1))
    direct.backward()
    engine.step()
    seen["direct"] = direct.item()
    seen["copies"] = [model(*batch(1)).item() for model in (copied, loaded)]
    seen["weights"] = weights(engine)
    seen["refusals"] = [
        outcome(lambda: engine.compile(schedule=[])),
        outcome(lambda: engine.compile(compiled_autograd_enabled=True)),
        outcome(lambda: engine.compile(compile_kwargs={"mode": "reduce-overhead"})),
    ]
    engine.destroy()
    seen["plain"] = all(module._compiled_call_impl is None for module in engine.module.modules())
    return seen


@pytest.mark.parametrize("stage", (2, 3))
def test_a_compiled_module_evaluates_copies_and_becomes_plain_again(stage: int) -> None:
    reference = build()
    plain(reference, adamw(reference), 0, 2)
    for seen in run_ranks(life, RANKS, stage):
        assert (seen["before"], seen["after"], seen["plain"]) == (False, True, True)
        assert seen["copies"] == pytest.approx([seen["evaluated"]] * 2, abs=1e-14)
        assert seen["direct"] == pytest.approx(seen["evaluated"], abs=1e-14)
        assert distance(seen["weights"], weights(reference)) <= 1e-12
        for refusal, said in zip(seen["refusals"], ("schedule", "compiled_autograd", "CUDA graphs"), strict=True):
            assert said in refusal or (stage < 3 and said == "CUDA graphs")
