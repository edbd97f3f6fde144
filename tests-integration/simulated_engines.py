"""Engines on the simulated accelerator, and the same on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from simulated_accelerator import BACKEND, Report, configure, watch
from torch import nn

WIDTH, TOKENS = 32, 17


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))  # replicated
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale + self.shift.to(self.scale.dtype)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


class Trained(NamedTuple):
    """Losses, the full weights, what was seen on the device, and whether parameters kept identity and attributes."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    report: Report | None
    kept: bool


def config(stage: int, dtype: str, **zero: Any) -> dict[str, Any]:
    """Many units, none persistent."""
    units = {"stage3_param_persistence_threshold": 0, "unit_min_numel": 1, "stage3_prefetch_bucket_size": 5000}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **units, **zero},
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
    }


def batch(step: int, device: str) -> torch.Tensor:
    """This rank's tokens, on their way to the device."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, TOKENS, (4, 6), generator=generator)
    return tokens if device == "cpu" else tokens.pin_memory().to(device, non_blocking=True)


def races_by_seed(settings: dict[str, Any], seeds: range) -> list[str]:
    """Return the races of an engine's steps, each step with the delays of another seed."""
    import zero_core

    torch.manual_seed(0)
    engine = zero_core.initialize(model=Model(), config=settings)[0]
    with watch() as report:
        for seed in seeds:
            configure(seed=seed + 1, longest_delay=100)
            steps(engine, range(seed, seed + 1))
    engine.destroy()
    return [str(race) for race in report.races]


def steps(engine: Any, numbers: range) -> list[float]:
    """Train these steps; return the losses."""
    losses = []
    for number in numbers:
        loss = engine(batch(number, "sim"))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def own_optimizer(stage: int, dtype: str) -> dict[str, Any]:
    """The configuration for an optimizer that the script makes."""
    return {key: value for key, value in config(stage, dtype).items() if key != "optimizer"}


def resumed(stage: int, dtype: str, keyword: str, folder: str) -> list[list[float]]:
    """Return the losses after a checkpoint, of the engine that wrote it and of one that loads it."""
    import zero_core

    found = []
    for loads in (False, True):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **{keyword: True})  # type: ignore[arg-type]
        engine = zero_core.initialize(model=model, optimizer=optimizer, config=own_optimizer(stage, dtype))[0]
        if loads:
            engine.load_checkpoint(folder)
        else:
            steps(engine, range(2))
            engine.save_checkpoint(folder)
        found.append(steps(engine, range(2, 4)))
        engine.destroy()
    return found


def states_from_before(keyword: str) -> list[list[float]]:
    """Return the losses of two steps after one that torch made on the CPU: by the engine, and by torch on the CPU."""
    import zero_core

    found = []
    for alone in (False, True):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(batch(0, "cpu")).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0][keyword] = True
        if alone:
            optimizer.param_groups[0][keyword] = False
            losses = []
            for number in (1, 2):
                loss = model(batch(number, "cpu"))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            found.append(losses)
        else:
            settings = {**own_optimizer(1, "fp32"), "gradient_clipping": 0.0}
            engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
            found.append(steps(engine, range(1, 3)))
            engine.destroy()
    return found


class OfTheDevice(torch.optim.SGD):
    """An optimizer whose kernels the CPU has not."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.device.type != "sim":
                    raise RuntimeError(f"no kernel for {parameter.device}")
        return super().step(closure)


def with_optimizer_of_the_device() -> list[float]:
    """Return the losses of two steps."""
    import zero_core

    model = Model()
    optimizer = OfTheDevice(model.parameters(), lr=1e-2)
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=own_optimizer(3, "bf16"))[0]
    losses = steps(engine, range(2))
    engine.destroy()
    return losses


def built_by_init() -> list[list[float]]:
    """Return the losses of a model that `Init` sharded on the CPU, and of one that was made in full."""
    import zero_core

    found = []
    for sharded in (True, False):
        torch.manual_seed(0)
        settings = config(3, "fp32")
        if sharded:
            with zero_core.Init(config=settings):
                model = Model()
        else:
            model = Model()
        engine = zero_core.initialize(model=model, config=settings)[0]
        found.append(steps(engine, range(2)))
        engine.destroy()
    return found


def initialised_for_the_device_alone() -> list[float]:
    """Return the losses of a model built by `Init` where the script's process group has no backend for the CPU."""
    import zero_core

    store = dist.PrefixStore("device alone", dist.distributed_c10d._get_default_store())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    with zero_core.Init(config=config(3, "bf16")):
        model = Model()
    engine = zero_core.initialize(model=model, config=config(3, "bf16"))[0]
    losses = steps(engine, range(2))
    engine.destroy()
    return losses


def with_wait_left_out(collective: str) -> Report:
    """Return what is seen of two steps in which the streams do not wait for one kind of collective."""
    import zero_core
    from zero_comm import CommError
    from zero_partition import PartitionError

    launch = getattr(dist, collective)

    class Unordered:
        def __init__(self, work: dist.Work) -> None:
            self.work = work

        def wait(self, *_: Any) -> bool:
            return True

    torch.manual_seed(0)
    engine = zero_core.initialize(model=Model(), config=config(3, "bf16"))[0]
    setattr(dist, collective, lambda *args, **keywords: Unordered(launch(*args, **keywords)))
    try:
        with watch() as report, contextlib.suppress(PartitionError, CommError):
            steps(engine, range(2))  # ranks may notice the wrong values
    finally:
        setattr(dist, collective, launch)
    return report


def with_hook() -> str:
    """Return the error for a model on the CPU with a hook on a gradient."""
    import zero_core
    import zero_partition

    model = Model()
    model.head.weight.register_post_accumulate_grad_hook(lambda _: None)
    try:
        zero_core.initialize(model=model, config=config(3, "fp32"))
    except zero_partition.PartitionError as error:
        return str(error)
    return "nothing was raised"


def trained(settings: dict[str, Any], device: str, seed: int, steps: int = 4) -> Trained:
    """Train a model that was made on the CPU."""
    import zero_core

    configure(seed=seed)
    torch.manual_seed(0)
    model = Model()
    before = list(model.parameters())
    for number, parameter in enumerate(before):
        parameter.number = number  # type: ignore[attr-defined]
    engine = zero_core.initialize(model=model, config=settings, device=device)[0]
    losses = []
    with watch() as report:
        for step in range(steps):
            loss = engine(batch(step, device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    after = list(engine.module.parameters())
    weights = {
        name: (engine.full_param(p) if engine.partition.find(p) else p.detach()).cpu()
        for name, p in engine.module.named_parameters()
    }
    kept = all(x is y and x.number == n for n, (x, y) in enumerate(zip(before, after, strict=True)))
    engine.destroy()
    return Trained([float(loss) for loss in losses], weights, None if device == "cpu" else report, kept)
