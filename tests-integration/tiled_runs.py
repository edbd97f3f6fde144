"""A small model with tiles, trained in one process and on ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_sequence import tiled, tiled_cross_entropy

CLASSES, WIDTH, BATCH, LENGTH = 13, 8, 4, 5


class Run(NamedTuple):
    """A run. ``tiles``: of the loss and the MLPs, 0 for none. ``uneven``: rank 1 has more of them. ``inside``:
    the loss is a part of the model's forward. ``plain``: backward is called on the loss, not on the engine."""

    tiles: int = 3
    tied: bool = False
    inside: bool = True
    plain: bool = False
    recompute: bool = False
    frozen: bool = False
    uneven: bool = False
    accumulation: int = 1
    steps: int = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.tiles = 0

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tiles:
            return x + tiled(self.mlp, tiled(self.norm, x, tiles=self.tiles), tiles=self.tiles)
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=not run.tied)
        if run.tied:
            self.head.weight = self.embedding.weight
        self.head.requires_grad_(not run.frozen)
        self.run = run
        self.set_tiles(run.tiles)

    def set_tiles(self, tiles: int) -> None:
        self.tiles = tiles
        for block in self.blocks:
            block.tiles = tiles

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.run.recompute else block(hidden)
        return self.loss(hidden, y) if self.run.inside else hidden

    def loss(self, hidden: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.tiles:
            return tiled_cross_entropy(hidden, self.head, y, tile_tokens=-(-y.numel() // self.tiles))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def build(run: Run) -> Model:
    torch.manual_seed(0)
    return Model(run).double()


def batch(number: int, rank: int = 0, world_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randint(0, CLASSES, (2, BATCH, LENGTH), generator=generator)
    mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    return x[mine], y[mine]


def plain(run: Run) -> dict[str, torch.Tensor]:
    """One process without tiles; returns the weights."""
    model = build(run._replace(tiles=0, inside=True, recompute=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(run.steps):
        for micro in range(run.accumulation):
            (model(*batch(step * run.accumulation + micro)) / run.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


class Trained(NamedTuple):
    """``arrivals``: gradients of the head's weight that autograd has accumulated. ``collectives``: of the head's unit
    in the last step, by phase."""

    weights: dict[str, torch.Tensor]
    arrivals: int
    collectives: dict[str, int]


def ranks(run: Run, stage: int) -> Trained:
    """Train on this job's ranks; return rank 0's weights."""
    import zero_core

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build(run)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // world_size,
        "gradient_accumulation_steps": run.accumulation,
        "data_types": {"param_dtype": "fp64"},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 500,
            "unit_min_numel": 1,
        },
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = zero_core.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-2), config=settings)[0]
    if run.uneven and rank:
        model.set_tiles(run.tiles + 2)
    arrivals: list[int] = []
    if not run.frozen:
        model.head.weight.register_post_accumulate_grad_hook(lambda _: arrivals.append(1))
    for step in range(run.steps):
        engine.ledger.reset()
        for micro in range(run.accumulation):
            x, y = batch(step * run.accumulation + micro, rank, world_size)
            output = engine(x, y)
            loss = output if run.inside else model.loss(output, y)
            loss.backward() if run.plain else engine.backward(loss)
            engine.step()
    collectives = {phase: row.calls for phase, unit, row in engine.ledger if unit.startswith("head")}
    found = engine.partition.find
    weights = {n: engine.full_param(p) if found(p) else p.detach().clone() for n, p in model.named_parameters()}
    engine.destroy()
    return Trained(weights, len(arrivals), collectives)
