"""DeepSpeed's names for compute in tiles give what one call gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zero_deepspeed.sequence_tiles import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from zero_sequence import SequenceError

WIDTH, CLASSES = 6, 11


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)


def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down(F.silu(self.up(x)))  # type: ignore[no-any-return]


def summed(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(self.head(x).flatten(0, -2), y.flatten(), reduction="sum")


def masked(self: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(self.head(x), y, reduction="none") * mask).sum()


def data(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(*shape, WIDTH, dtype=torch.float64), torch.randint(0, CLASSES, shape)


def same(ours: Callable[[Model, torch.Tensor], Any], theirs: Callable[[Model, torch.Tensor], Any], *shape: int) -> None:
    torch.manual_seed(0)
    model = Model().double()
    results = []
    for call in (ours, theirs):
        one, x = copy.deepcopy(model), data(*shape)[0].requires_grad_()
        output = call(one, x)
        (output * torch.linspace(1, 2, output.numel()).view(output.shape)).sum().backward()
        results.append([output.detach(), x.grad, *(p.grad for p in one.parameters() if p.grad is not None)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", ((2, 5), (7,), (1, 1)))
def test_tiled_mlp(shape: tuple[int, ...]) -> None:
    same(lambda model, x: TiledMLP.apply(mlp, model, x, 3, [model.up.weight]), mlp, *shape)


@pytest.mark.parametrize("shards", (1, 3, 20))
def test_tiled_fused_logits_loss(shards: int) -> None:
    y = data(2, 5)[1]
    same(
        lambda model, x: TiledFusedLogitsLoss.apply(summed, model, x, y, None, shards, [model.head.weight], "sum"),
        lambda model, x: summed(model, x, y),
        2,
        5,
    )


def test_tiled_fused_logits_loss_with_a_mask_and_as_a_mean_of_tiles() -> None:
    y, mask = data(2, 6)[1], torch.arange(12).view(2, 6) % 3 > 0
    same(
        lambda model, x: TiledFusedLogitsLoss.apply(masked, model, x, y, mask, 4, None, "mean"),
        lambda model, x: masked(model, x.flatten(0, 1), y.flatten(), mask.flatten()) / 4,
        2,
        6,
    )


@pytest.mark.parametrize("reduction", ("sum", "mean", None))
def test_sequence_tiled_compute_joins_or_stacks_and_reduces(reduction: str | None) -> None:
    def scaled(x: torch.Tensor, model: Model, factor: float) -> torch.Tensor:
        return mlp(model, x) * factor

    def ours(model: Model, x: torch.Tensor) -> torch.Tensor:
        return sequence_tiled_compute(
            scaled, 5, 3, {"x": x}, {"model": model, "factor": 2.0}, "x", [], output_reduction=reduction
        )

    def theirs(model: Model, x: torch.Tensor) -> torch.Tensor:
        output = scaled(x, model, 2.0)
        return output if reduction is None else getattr(output, reduction)()  # type: ignore[no-any-return]

    same(ours, theirs, 2, 5)


def test_sequence_tiled_compute_as_an_autograd_function() -> None:
    y = data(2, 6)[1]

    def loss(x: torch.Tensor, y: torch.Tensor, self: Model) -> torch.Tensor:
        return summed(self, x, y)

    def ours(model: Model, x: torch.Tensor) -> torch.Tensor:
        return SequenceTiledCompute.apply(loss, 6, 3, ["x", "y"], ["self"], "x", None, 0, "sum", x, y, model)

    same(ours, lambda model, x: summed(model, x, y), 2, 6)


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    model, (x, y) = Model().double(), data(2, 5)
    with pytest.raises(SequenceError, match=r"a name of kwargs_to_shard \(x\), got 'z'"):
        sequence_tiled_compute(F.silu, 5, 2, {"x": x}, {}, "z")
    with pytest.raises(SequenceError, match=r"seqlen=4 in dimension 1, got {'x': 5}"):
        sequence_tiled_compute(F.silu, 4, 2, {"x": x}, {}, "x")
    with pytest.raises(SequenceError, match=r"equal batch and sequence dimensions, got \(2, 5, 6\), \(2, 4\)"):
        TiledFusedLogitsLoss.apply(summed, model, x, y[:, 1:], None, 2, None, "sum")
    with pytest.raises(SequenceError, match="'mean' or 'sum', got 'max'"):
        TiledFusedLogitsLoss.apply(summed, model, x, y, None, 2, None, "max")
