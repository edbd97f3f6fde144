"""Cross entropy in tiles: time and memory beside the whole logits, and beside gradients computed in forward.

`python packages/zero-sequence/bench/bench_tiled_loss.py [tokens width classes]`, default 4096 512 16384, float32. Each
measurement is forward and backward of the head and the loss; the ratio is to the whole logits in the same round. "In
forward" differentiates each tile as soon as its logits are there, so backward only scales: it computes the head's
product once less, and holds the gradients of the head and of the hidden states from forward on.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from live_storages import LiveStorages

from zero_sequence import tiled_cross_entropy

ROUNDS, TILES = 5, (4, 16)
Loss = Callable[[torch.Tensor, nn.Module, torch.Tensor], torch.Tensor]


class _InForward(torch.autograd.Function):
    """The other way: a tile's gradients are computed in forward, and scaled in backward."""

    @staticmethod
    def forward(ctx: Any, size: int, head: nn.Linear, labels: torch.Tensor, hidden: torch.Tensor, weight: Any) -> Any:
        of_hidden, of_weight, total = torch.empty_like(hidden), torch.zeros_like(weight), hidden.new_zeros(())
        for part, label, into in zip(hidden.split(size), labels.split(size), of_hidden.split(size), strict=True):
            tile = part.detach().requires_grad_()
            with torch.enable_grad():
                loss = F.cross_entropy(head(tile), label, reduction="sum")
            found = torch.autograd.grad(loss, [tile, weight])
            into.copy_(found[0])
            of_weight.add_(found[1])
            total += loss.detach()
        ctx.save_for_backward(of_hidden, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        return None, None, None, of_hidden * gradient, of_weight * gradient


def whole(hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(hidden), labels)


def in_forward(size: int) -> Loss:
    def loss(hidden: torch.Tensor, head: Any, labels: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = _InForward.apply(size, head, labels, hidden, head.weight)  # type: ignore[no-untyped-call]
        return total / labels.numel()

    return loss


def recomputed(size: int) -> Loss:
    return lambda hidden, head, labels: tiled_cross_entropy(hidden, head, labels, tile_tokens=size)


def main() -> None:
    tokens, width, classes = map(int, sys.argv[1:4]) if len(sys.argv) > 3 else (4096, 512, 16384)
    head = nn.Linear(width, classes, bias=False)
    hidden, labels = torch.randn(tokens, width).requires_grad_(), torch.randint(0, classes, (tokens,))

    def once(loss: Loss) -> float:
        hidden.grad = head.weight.grad = None
        begin = time.perf_counter()
        loss(hidden, head, labels).backward()
        return time.perf_counter() - begin

    def peak(loss: Loss) -> int:
        hidden.grad = head.weight.grad = None
        with LiveStorages() as live:
            loss(hidden, head, labels).backward()
        return live.peak

    ways = {"whole logits": whole}
    for tiles in TILES:
        ways |= {f"{tiles} tiles, in forward": in_forward(-(-tokens // tiles))}
        ways |= {f"{tiles} tiles, recomputed": recomputed(-(-tokens // tiles))}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, loss in ways.items():
            taken = once(loss)
            if number:  # the first round warms up
                seconds[name].append(taken)
    print(f"{tokens} tokens, width {width}, {classes} classes, float32, {torch.get_num_threads()} threads")
    for name, loss in ways.items():
        ratios = sorted(mine / base for mine, base in zip(seconds[name], seconds["whole logits"], strict=True))
        print(
            f"{name:24} {statistics.median(seconds[name]) * 1e3:8.0f} ms   x {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})   peak {peak(loss) / 2**20:7.1f} MiB"
        )


if __name__ == "__main__":
    main()
