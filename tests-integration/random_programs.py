"""Random training programs in which each rank computes something else, run by plain torch and on ranks.

A program follows from its seed: what every rank's batches go through, in each step and micro-batch, which calls a
micro-batch makes, and where collectives of the user's stand between them. Plain torch runs all ranks' batches one after
the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_core

WIDTH, INPUTS, ROWS, STEPS = 8, 4, 3, 6
CHECKPOINTS = ("checkpoint", "nested")
PLACES = 6  # where a micro-batch may have a collective
KINDS = ("block", "block", "vision", "frozen", "scale", "tied", "unused", "no_grad", "loop", *CHECKPOINTS)
SHAPES = ("plain", "several", "evaluates", "parts", "twice", "penalty", "second_order")


class Use(NamedTuple):
    """One thing that a forward does; ``inner``: what a block uses beside its layer, "gate", "weight" or experts."""

    kind: str
    block: int
    inner: tuple[str, ...]
    times: int


class Block(nn.Module):
    """A layer, experts of which a call uses those that it is told to, and a parameter of its own between them."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        two = [nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH, bias=False)) for _ in range(experts)]
        self.experts = nn.ModuleList(two)
        self.gate = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor, inner: Sequence[str]) -> torch.Tensor:
        h = torch.tanh(self.layer(self.norm(x)))
        for name in inner:
            if name == "gate":
                h = h * self.gate
            elif name == "weight":
                h = h + 0.1 * F.linear(x, self.layer.weight)
            else:
                h = h + self.experts[int(name)](h)
        return x + h


class Net(nn.Module):
    """Runs the uses that it is told to."""

    def __init__(self, blocks: int, experts: int) -> None:
        super().__init__()
        self.enter = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block(experts) for _ in range(blocks))
        self.vision = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.leave = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, uses: Sequence[Use]) -> torch.Tensor:
        h = self.enter(x)
        for use in uses:
            h = self._use(use, h, x)
        return self.leave(h)

    def _use(self, use: Use, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[use.block]
        if use.kind == "block":
            return block(h, use.inner)
        if use.kind == "vision":
            return h + self.vision(x)
        if use.kind == "frozen":
            return h + self.frozen(h)
        if use.kind == "scale":
            return h * self.scale
        if use.kind == "tied":
            return h + 0.2 * F.linear(torch.tanh(F.linear(h, self.enter.weight.t())), self.enter.weight)
        if use.kind == "unused":
            block(h, use.inner)
            return h
        if use.kind == "no_grad":
            with torch.no_grad():
                noise = block(h, use.inner)
            return h + 0.1 * noise
        if use.kind == "loop":
            for _ in range(use.times):
                h = block(h, use.inner)
            return h
        return checkpoint(block, h, use.inner, use_reentrant=use.kind == "nested")


@dataclass(frozen=True)
class Program:
    """What a seed decides. ``alike``: steps in which all ranks compute the same; ``one``: then one rank at a time
    computes something else, not all of them; ``plainly``: ``loss.backward()`` is called, not the engine's."""

    seed: int
    blocks: int
    experts: int
    accumulation: int
    alike: int
    one: bool
    plainly: bool
    checkpoints: bool
    shapes: tuple[str, ...]

    @classmethod
    def of(cls, seed: int) -> Program:
        rng = random.Random(f"program {seed}")
        return cls(
            seed=seed,
            blocks=rng.randint(1, 4),
            experts=rng.randint(1, 3),
            accumulation=rng.choice((1, 1, 2, 3)),
            alike=rng.choice((0, 1, 3)),
            one=rng.random() < 0.5,
            plainly=rng.random() < 0.3,
            checkpoints=rng.random() < 0.6,
            shapes=("plain", *rng.sample(SHAPES, 2)),
        )

    def uses(self, step: int, micro: int, rank: int, call: int) -> list[Use]:
        """What a rank's call ``call`` of a micro-batch computes."""
        same = step < self.alike or (self.one and rank != step % 3)
        rng = random.Random(f"{self.seed}" if same else f"{self.seed} {step} {micro} {rank} {call}")
        kinds = [kind for kind in KINDS if self.checkpoints or kind not in CHECKPOINTS]
        inner = ("gate", "weight", *map(str, range(self.experts)))
        return [
            Use(
                rng.choice(kinds),
                rng.randrange(self.blocks),
                tuple(rng.choice(inner) for _ in range(rng.randint(0, 3))),
                rng.randint(1, 3),
            )
            for _ in range(rng.randint(0, 4))
        ]

    def shape(self, step: int, micro: int) -> str:
        """How the calls of a micro-batch follow each other, the same on all ranks."""
        return "plain" if step < self.alike else random.Random(f"{self.seed} {step} {micro}").choice(self.shapes)


class Run:
    """One way of running a program; `Sharded` overrides what differs."""

    def __init__(self, program: Program, world_size: int) -> None:
        torch.manual_seed(program.seed)
        self.program, self.world_size = program, world_size
        self.model: Any = Net(program.blocks, program.experts).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3)
        self.top: Any = self.model

    def ranks(self) -> Sequence[int]:
        return range(self.world_size)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        (loss / self.program.accumulation / self.world_size).backward(**options)

    def micro_batch_ends(self, micro: int) -> None:
        if micro + 1 == self.program.accumulation:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def collective(self, _place: object) -> None:
        """Nobody else is there."""

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def train(self) -> dict[str, torch.Tensor]:
        """Run the program; return the weights."""
        for step in range(STEPS):
            for micro in range(self.program.accumulation):
                for rank in self.ranks():
                    self._micro_batch(step, micro, rank)
                self.micro_batch_ends(micro)
        return self.weights()

    def _micro_batch(self, step: int, micro: int, rank: int) -> None:
        shape, number = self.program.shape(step, micro), 100 * step + 10 * micro
        places = iter([(number, place) for place in range(PLACES)])
        calls = iter(range(PLACES))

        def predicted() -> torch.Tensor:
            call = next(calls)
            out = self.top(rows(number + call, rank), self.program.uses(step, micro, rank, call))
            self.collective(next(places))
            return out

        if shape == "parts":
            h = self.model.enter(rows(number, rank))
            self.collective(next(places))
            loss = self.model.leave(self.model.blocks[step % self.program.blocks](h, ())).square().mean()
        elif shape == "second_order":
            x = rows(number, rank).requires_grad_()
            out = self.top(x, [use for use in self.program.uses(step, micro, rank, 0) if use.kind != "nested"])
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            self.collective(next(places))
            loss = out.square().mean() + slope.square().mean()
        else:
            loss = predicted().square().mean()
        if shape == "several":
            loss = loss + predicted().square().mean()
        elif shape == "penalty":
            loss = loss + 0.01 * sum(p.square().sum() for p in self.model.leave.parameters())
        elif shape == "evaluates":
            with torch.no_grad():
                predicted()
        elif shape == "twice":
            self.backward(loss, retain_graph=True)
            self.collective(next(places))
            loss = predicted().square().mean()
        self.backward(loss)
        self.collective(next(places))


class Sharded(Run):
    """The program on this rank, with an engine."""

    def __init__(self, program: Program, stage: int, settings: dict[str, Any], **zero: Any) -> None:
        super().__init__(program, dist.get_world_size())
        if zero.pop("tier", None) and stage:
            zero["offload_optimizer"] = {"device": "cpu"}
            zero |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": program.accumulation,
            "gradient_clipping": 0.0,
            "data_types": {"param_dtype": "fp64"},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
            **settings,
        }
        self.top = zero_core.initialize(model=self.model, optimizer=self.optimizer, config=config)[0]

    def ranks(self) -> Sequence[int]:
        return (dist.get_rank(),)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        if self.program.plainly:
            (loss / self.program.accumulation).backward(**options)
        else:
            self.top.backward(loss, **options)

    def micro_batch_ends(self, micro: int) -> None:
        self.top.step()

    def collective(self, place: object) -> None:
        kind = random.Random(f"{self.program.seed} {place}").choice(("none", "sum", "barrier", "object"))
        if kind == "sum":
            dist.all_reduce(torch.ones(2))
        elif kind == "barrier":
            dist.barrier()
        elif kind == "object":
            dist.broadcast_object_list([dist.get_rank()], src=self.world_size - 1)

    def weights(self) -> dict[str, torch.Tensor]:
        found = {name: self.top.full_param(p).detach().clone() for name, p in self.model.named_parameters()}
        self.top.destroy()
        return found


def rows(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64)


def place_of(seed: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Where the program of ``seed`` runs: its stage, settings of the configuration, and those of its ZeRO section."""
    rng = random.Random(f"place {seed}")
    stage = rng.choice((0, 1, 2, 3, 3, 3, 3))
    settings = {"audit_every": 2} if rng.random() < 0.2 else {}
    zero: dict[str, Any] = {"unit_min_numel": 1} if rng.random() < 0.5 else {}
    return stage, settings, zero | ({"tier": "cpu"} if rng.random() < 0.3 else {})


def deviations(seeds: Sequence[int]) -> dict[int, float]:
    """By seed, the largest difference of a weight from plain torch's, on this rank."""
    return dict(_deviations(seeds))


def _deviations(seeds: Sequence[int]) -> Iterator[tuple[int, float]]:
    for seed in seeds:
        stage, settings, zero = place_of(seed)
        ours = Sharded(Program.of(seed), stage, settings, **zero).train()
        theirs = Run(Program.of(seed), dist.get_world_size()).train()
        worst = max(
            float((ours[name] - value).abs().nan_to_num(nan=float("inf")).max()) for name, value in theirs.items()
        )
        yield seed, worst
