"""What scripts of known methods run on: trainers by plain torch and by the engine, batches, what to compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import zero_core

ROWS, WIDTH = 6, 8


class PlainTrainer:
    """A model and its torch.optim optimizer in one process."""

    def __init__(self, bench: Workbench, model: nn.Module, optimizer: Optimizer) -> None:
        self.module, self.optimizer, self.bench = model, optimizer, bench

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def gathered(self, _parameters: Any, modifier_rank: int | None = None) -> Iterator[None]:
        yield

    def full(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.detach().clone()


class EngineTrainer:
    """The same through `zero_core.initialize`."""

    def __init__(self, bench: Workbench, model: nn.Module, optimizer: Optimizer) -> None:
        self.module = model
        config = {
            "train_micro_batch_size_per_gpu": ROWS // bench.world_size,
            "gradient_clipping": 0.0,
            "steps_per_print": 0,
            "zero_optimization": {
                "stage": bench.stage,
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 50,
                "unit_min_numel": bench.unit_min_numel,
                **bench.offload(),
            },
            **(
                {"bf16": {"enabled": True}}
                if bench.dtype == torch.bfloat16
                else {"data_types": {"param_dtype": "fp64"}}
            ),
        }
        self.engine, self.optimizer, _, _ = zero_core.initialize(model=model, optimizer=optimizer, config=config)

    def __call__(self, *args: Any) -> Any:
        return self.engine(*args)

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def gathered(self, parameters: Any, modifier_rank: int | None = None) -> Any:
        return self.engine.gathered(parameters, modifier_rank)

    def full(self, parameter: nn.Parameter) -> torch.Tensor:
        if self.engine.partition.find(parameter) is None:
            return parameter.detach().clone()
        return self.engine.full_param(parameter)


class Workbench:
    """What a script gets: a way to make trainers, batches, and a place for what it computed."""

    def __init__(
        self,
        *,
        plain: bool,
        stage: int = 0,
        dtype: torch.dtype = torch.float64,
        tier: str = "device",
        unit_min: int = 1,
        folder: str = "",
    ) -> None:
        self.folder = folder
        self.plain, self.stage, self.dtype, self.tier, self.unit_min_numel = plain, stage, dtype, tier, unit_min
        self.rank = 0 if plain else dist.get_rank()
        self.world_size = 1 if plain else dist.get_world_size()
        self.values: dict[str, torch.Tensor] = {}
        self.trainers: list[Any] = []

    def trainer(self, model: nn.Module, chosen: Any = None, lr: float = 0.05, kind: str = "sgd") -> Any:
        """Wrap ``model``; ``chosen`` are the parameters that the optimizer gets."""
        parameters = list(model.parameters()) if chosen is None else chosen
        if kind == "sgd":
            optimizer: Optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=lr)
        made = (PlainTrainer if self.plain else EngineTrainer)(self, model, optimizer)
        self.trainers.append(made)
        return made

    def rows(self, number: int, *shape: int) -> torch.Tensor:
        """This rank's rows of a batch of normal numbers."""
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(ROWS, *(shape or (WIDTH,)), generator=generator, dtype=torch.float64)
        return whole[self._mine()].to(self.dtype)

    def tokens(self, number: int, vocabulary: int, *shape: int) -> torch.Tensor:
        """This rank's rows of a batch of numbers below ``vocabulary``."""
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, vocabulary, (ROWS, *shape), generator=generator)[self._mine()]

    def keep(self, trainer: Any, prefix: str = "") -> None:
        """Compare all weights of a trainer."""
        for name, parameter in trainer.module.named_parameters():
            self.values[prefix + name] = trainer.full(parameter).double()

    def close(self) -> None:
        """Destroy the engines."""
        if not self.plain:
            for trainer in self.trainers:
                trainer.engine.destroy()

    def offload(self) -> dict[str, Any]:
        """Where states go, and on disks at stage 3 shards too."""
        if self.tier == "device" or not self.stage:
            return {}
        if self.tier == "cpu":
            return {"offload_optimizer": {"device": "cpu"}}
        folder = Path(self.folder, str(len(self.trainers)))  # a store has one owner
        folder.mkdir(parents=True, exist_ok=True)
        nvme = {"device": "nvme", "nvme_path": str(folder)}
        return {"offload_optimizer": nvme} | ({"offload_param": nvme} if self.stage == 3 else {})

    def _mine(self) -> slice:
        return slice(self.rank * ROWS // self.world_size, (self.rank + 1) * ROWS // self.world_size)


def mlp(seed: int = 0, width: int = WIDTH, out: int = WIDTH, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, out)).to(dtype)


class Scripts(dict[str, Callable[[Workbench], None]]):
    """The scripts of one file, by name; as a decorator it adds one."""

    def __call__(self, script: Callable[[Workbench], None]) -> Callable[[Workbench], None]:
        self[script.__name__] = script
        return script
