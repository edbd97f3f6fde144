"""The checkpoints that conversions are tested on, and a source that counts reads and fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

import zero_ckpt  # noqa: E402
from zero_ckpt import Interval, save_sharded  # noqa: E402
from zero_ckpt.torch import dtype_name, tensor_buffer  # noqa: E402


def tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed.weight": torch.randn(37, 11, generator=generator).bfloat16(),
        "mid.weight": torch.randn(11, 11, generator=generator),
        "scale": torch.randn((), generator=generator, dtype=torch.float64),
        "count": torch.arange(5),
        "none": torch.empty(0, 3),
    }


def checkpoint(root: Path) -> dict[str, Any]:
    """A checkpoint with masters, moments and a tied head; returns its tensors, the embedding's master last."""
    values = tensors()
    master = torch.randn(37, 11)
    intervals = [
        Interval(
            name,
            "buffer" if name == "count" else "param",
            tuple(value.shape),
            dtype_name(value.dtype),
            0,
            tensor_buffer(value),
        )
        for name, value in values.items()
    ]
    intervals.append(Interval("embed.weight", "master", (37, 11), "F32", 0, tensor_buffer(master)))
    intervals.append(Interval("embed.weight", "exp_avg", (37, 11), "F32", 0, tensor_buffer(master * 2)))
    save_sharded(root, "t", intervals, step=5, aliases={"head.weight": "embed.weight"})
    return {**values, "master": master}


class Counting:
    """A source that counts its reads and raises `error` at one of them."""

    def __init__(self, source: Any, stop: int = -1, error: BaseException | None = None) -> None:
        self._source, self._stop, self._error = source, stop, error or KeyboardInterrupt()
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read_into(self, *place: Any) -> None:
        self.reads += 1
        if self.reads == self._stop:
            raise self._error
        self._source.read_into(*place)


def weights_only(root: Path) -> Path:
    zero_ckpt.save(root / "weights", {"model": torch.nn.Linear(2, 2)})
    return root / "weights"


def blocks(tmp_path: Path) -> torch.nn.Sequential:
    """A saved model of eight layers, two of them frozen, one trained but never with a gradient."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    model[1].requires_grad_(False)
    model[5].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    hidden = torch.randn(3, 64)
    for number in (0, 1, 2, 4, 5, 6, 7):
        hidden = model[number](hidden)
    hidden.square().mean().backward()
    optimizer.step()
    zero_ckpt.save(tmp_path / "ckpt", {"model": model, "optimizer": optimizer}, step=1)
    return model
