"""A tensor-parallel model as people write it with an mpu: a grid of ranks, and layers that know their part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, HIDDEN, LAYERS, CLASSES = 6, 12, 3, 5


class Grid:
    """An mpu of the world as (data, model): consecutive ranks compute one layer together."""

    def __init__(self, parts: int) -> None:
        world = torch.arange(dist.get_world_size()).view(-1, parts)
        self._data, self._model = divmod(dist.get_rank(), parts)
        groups = [[dist.new_group(row) for row in rows.tolist()] for rows in (world, world.t())]
        self._model_group, self._data_group = groups[0][self._data], groups[1][self._model]

    def get_model_parallel_rank(self) -> int:
        return self._model

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._model_group)

    def get_model_parallel_group(self) -> Any:
        return self._model_group

    def get_data_parallel_rank(self) -> int:
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data_group)

    def get_data_parallel_group(self) -> Any:
        return self._data_group


class _Enter(torch.autograd.Function):
    """Every part reads the same input, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradient.clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class _Leave(torch.autograd.Function):
    """The output is the sum of the parts', whose gradients are all the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Layer(nn.Module):
    """Residual block; the first matrix is cut by its rows, the second by its columns, the rest is on every rank."""

    def __init__(self, mpu: Any) -> None:
        super().__init__()
        self.rank, self.size, self.group = 0, 1, None
        if mpu is not None:
            self.rank, self.size = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
            self.group = mpu.get_model_parallel_group()
        self.norm = nn.LayerNorm(WIDTH)
        up, down, shift = torch.randn(HIDDEN, WIDTH) / 2, torch.randn(WIDTH, HIDDEN) / 3, torch.randn(HIDDEN) / 4
        self.up = nn.Parameter(up.chunk(self.size)[self.rank].clone())
        self.up_bias = nn.Parameter(shift.chunk(self.size)[self.rank].clone())
        self.down = nn.Parameter(down.chunk(self.size, 1)[self.rank].clone())
        self.down_bias = nn.Parameter(torch.randn(WIDTH) / 5)
        self.up.model_parallel = self.up_bias.model_parallel = True  # Megatron's old mark and its new one
        self.down.tensor_model_parallel = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h = h if self.group is None else _Enter.apply(h, self.group)
        h = F.linear(F.gelu(F.linear(h, self.up, self.up_bias)), self.down)
        h = h if self.group is None else _Leave.apply(h, self.group)
        return x + h + self.down_bias


class Net(nn.Module):
    """The same weights as one process with the same seed would have, in parts."""

    def __init__(self, mpu: Any = None, *, recompute: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(mpu) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.recompute is None else self.recompute(layer, x)
        return F.cross_entropy(self.head(x), y)


def whole_of(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """One parameter from its parts; those that are on every rank must agree to the last bit."""
    kind = name.rsplit(".", 1)[-1]
    if kind in ("up", "up_bias", "down"):
        return torch.cat(parts, 1 if kind == "down" else 0)
    assert all(torch.equal(part, parts[0]) for part in parts), name
    return parts[0]
