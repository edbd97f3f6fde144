"""Models built inside Init start with the weights that one process draws, and train on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from torch import nn
from training import Run

from zero_comm import run_ranks
from zero_partition import gathered_anywhere


class InParent(nn.Module):
    """The parent initialises children after attaching them, by `apply`, by name, and through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(zoo.VOCAB, zoo.WIDTH)
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(2))
        self.head = nn.Linear(zoo.WIDTH, zoo.VOCAB, bias=False)
        self.own = nn.Parameter(torch.randn(zoo.WIDTH))
        self.register_buffer("noise", torch.randn(zoo.WIDTH))
        self.apply(self.draw)
        nn.init.orthogonal_(self.blocks[0].up.weight)
        nn.init.trunc_normal_(self.blocks[1].up.weight, std=0.3)
        with torch.no_grad():
            self.head.weight.mul_(0.5)
            self.blocks[1].down.bias.data = torch.randn(zoo.WIDTH)
            self.blocks[0].down.bias.data.uniform_(-1, 1)
        self.blocks.insert(1, zoo.Block())

        class DeclaredInside(nn.Linear):
            def reset_parameters(self) -> None:
                nn.init.uniform_(self.weight, -0.1, 0.1)
                nn.init.ones_(self.bias)

        self.blocks.append(DeclaredInside(zoo.WIDTH, zoo.WIDTH))

    @staticmethod
    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        h = self.embedding(x) + self.own
        h = h + self.noise.to(h.dtype)
        for block in self.blocks:
            h = block(h)
        return [nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())]


BUILDERS: dict[str, Callable[[], nn.Module]] = {"reset_parameters": zoo.Transformer, "in the parent": InParent}


def built(kind: str, steps: int, own_seeds: bool) -> tuple[dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """Initial weights, the share of elements held after Init, and the weights after some steps."""
    import zero_core

    run = Run(dtype="fp32", steps=steps)
    config = training.config(run, 3, dist.get_world_size())
    torch.manual_seed(dist.get_rank() if own_seeds else 0)
    with zero_core.Init(config):
        model = BUILDERS[kind]()
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    total = sum(p.numel() * 4 for p in model.parameters())
    engine = training.start(run, 3, model)
    initial = training.weights(engine)
    training.train(engine, run, 0, steps)
    return initial, held / total, training.weights(engine)


@pytest.mark.parametrize(
    ("own_seeds", "world_size", "kind"),
    [
        (False, 1, "reset_parameters"),
        (True, 2, "reset_parameters"),
        (False, 2, "in the parent"),
        (True, 3, "in the parent"),
        *(
            pytest.param(own_seeds, n, kind, marks=pytest.mark.soak)
            for own_seeds in (False, True)
            for n in (1, 2, 3)
            for kind in BUILDERS
        ),
    ],
)
def test_initial_weights_are_those_of_one_process(kind: str, world_size: int, own_seeds: bool) -> None:
    torch.manual_seed(0)
    alone = BUILDERS[kind]()
    expected = {name: p.detach() for name, p in alone.named_parameters()}
    initial, held, trained = run_ranks(built, world_size, kind, 3, own_seeds)[0]
    assert training.bits(initial) == training.bits(expected)
    assert held < (0.2 if world_size > 1 else 1.01)
    assert training.deviation(trained, training.plain(Run(dtype="fp32", steps=3), alone)) <= 1e-5


class DrawsAlone(zoo.Transformer):
    """Initialised by Python's generator, on rank 0 alone, and, in what is sharded already, inside gathers."""

    def __init__(self) -> None:
        super().__init__()
        first = not dist.is_initialized() or dist.get_rank() == 0
        for block in self.blocks:
            nn.init.constant_(block.up.bias, random.random())
        self.own = nn.Parameter(torch.zeros(zoo.WIDTH))
        if first:
            nn.init.normal_(self.own)
        with gathered_anywhere([self.embedding.weight, *self.blocks.parameters()], modifier_rank=0), torch.no_grad():
            if first:
                self.embedding.weight.normal_()
                self.blocks[0].up.weight.copy_(self.blocks[1].up.weight * 3)
                self.blocks[0].down.bias.data = torch.ones(zoo.WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [loss + 0.1 * self.own.float().square().mean() for loss in super().forward(x, y)]


def drawn_alone(
    stage: int, tier: str, dtype: str, folder: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Initial weights, and those after some steps."""
    import zero_core

    run = Run(dtype=dtype)
    random.seed(7 + dist.get_rank())
    torch.manual_seed(3)
    with zero_core.Init(training.config(run, stage, dist.get_world_size())):
        model = DrawsAlone()
    engine = training.start(run, stage, model, **training.offload(stage, tier, folder))
    initial = training.weights(engine)
    training.train(engine, run, 0, 3)
    return initial, training.weights(engine)


@pytest.mark.parametrize(
    ("world_size", "stage", "tier", "dtype"),
    [
        (1, 3, "nvme", "fp32"),
        (2, 3, "cpu", "fp32"),
        (3, 3, "nvme", "bf16"),
        (2, 2, "cpu", "fp32"),
        (3, 1, "device", "fp32"),
        (2, 0, "device", "fp32"),
        *(
            pytest.param(n, stage, tier, dtype, marks=pytest.mark.soak)
            for n in (1, 2, 3)
            for stage in (0, 1, 2, 3)
            for tier in ("device", *(("cpu", "nvme") if stage else ()))
            for dtype in ("fp32", "bf16")
        ),
    ],
)
def test_what_ranks_draw_differently_or_inside_gathers_is_rank_0s_on_every_tier(
    world_size: int, stage: int, tier: str, dtype: str, tmp_path: Path
) -> None:
    random.seed(7)
    torch.manual_seed(3)
    alone = DrawsAlone()
    expected = {name: p.detach().clone() for name, p in alone.named_parameters()}
    trained = training.plain(Run(dtype="fp32", steps=3), alone)
    for first, last in run_ranks(drawn_alone, world_size, stage, tier, dtype, str(tmp_path)):
        assert training.deviation(first, expected) <= (0.0 if dtype == "fp32" else 0.01)
        assert training.deviation(last, trained) <= (1e-5 if dtype == "fp32" else 0.05)


def edited(own_init: bool) -> tuple[list[float], list[float], list[float]]:
    """A weight edited under a gather before the engine exists, then under the engine."""
    import zero_core

    run = Run(dtype="fp32")
    with zero_core.Init(training.config(run, 3, dist.get_world_size()), enabled=own_init):
        model = zoo.build("plain", torch.float32)
    weight = model.blocks[1].up.bias
    with zero_core.gathered([weight, None, torch.ones(2), model.norm.weight], modifier_rank=0):
        weight.data.fill_(3.0 + dist.get_rank())
    with zero_core.gathered(weight):
        before = weight.tolist()
    engine = training.start(run, 3, model)
    at_start = engine.full_param(weight).tolist()
    with zero_core.gathered(weight, modifier_rank=1), torch.no_grad():
        weight.mul_(2.0 + dist.get_rank())
    after = engine.full_param(weight).tolist()
    engine.destroy()
    return before, at_start, after


@pytest.mark.parametrize("own_init", (True, False))
def test_gathered_edits_reach_every_rank_before_and_after_the_engine_exists(own_init: bool) -> None:
    for rank, (before, at_start, after) in enumerate(run_ranks(edited, 2, own_init)):
        assert set(before) == ({3.0} if own_init else {3.0 + rank})
        assert set(at_start) == {3.0} and set(after) == {9.0}
