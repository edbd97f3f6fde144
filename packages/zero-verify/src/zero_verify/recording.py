"""Read what the ranks of one run wrote: one checkpoint per engine and step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zero_ckpt import Checkpoint, open_checkpoint
from zero_ckpt.torch import tensor_buffer, torch_dtype

GRADIENT, WEIGHT = "gradient", "weight"


def engine_folder(folder: Path, number: int, part: int | None) -> Path:
    """Where the steps of the script's engine ``number`` are; of one ``part`` where several ranks share its model."""
    return folder / (f"engine {number:03d}" if part is None else f"engine {number:03d} part {part:03d}")


def step_tag(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step{step:05d}"


class Step:
    """One step of one engine."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def config(self) -> dict[str, Any]:
        """The engine's resolved configuration, as plain data."""
        config: dict[str, Any] = self._checkpoint.config
        return config

    @property
    def norm(self) -> float:
        """Global gradient norm before clipping."""
        return float(self._checkpoint.client_state["norm"])

    @property
    def taken(self) -> bool:
        """Return whether the weights were updated."""
        return bool(self._checkpoint.client_state["taken"])

    @property
    def losses(self) -> list[list[float]]:
        """By rank, the losses given to `engine.backward`."""
        return [list(state["losses"]) for state in self._checkpoint.rank_state]

    @cached_property
    def reads(self) -> dict[tuple[int, str], list[str]]:
        """By rank and parameter name, digests of the weight in the order in which forward read it."""
        found: dict[tuple[int, str], list[str]] = {}
        for rank, state in enumerate(self._checkpoint.rank_state):
            for name, digest in state["reads"]:
                found.setdefault((rank, name), []).append(digest)
        return found

    def names(self, kind: str) -> list[str]:
        """Parameters that have a tensor of this kind, in the model's order."""
        return [name for name in self._checkpoint.client_state["names"] if (name, kind) in self._checkpoint.tensors]

    def tensor(self, kind: str, name: str) -> torch.Tensor:
        """A whole tensor."""
        entry = self._checkpoint.entry(name, kind)
        out = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        self._checkpoint.read_into(name, kind, 0, tensor_buffer(out))
        return out


class Recording:
    """A recorded run.

    Attributes:
        engines: for each engine of the script that trained (and each part of its model), the folder of its steps.
    """

    def __init__(self, folder: Path) -> None:
        self.engines = sorted(folder.glob("engine *"))

    def count(self, engine: int) -> int:
        """Steps of one engine."""
        return sum(1 for _ in self._places(engine))

    def steps(self, engine: int) -> Iterator[Step]:
        """The steps of one engine in order."""
        for place in self._places(engine):
            yield Step(open_checkpoint(place))

    def _places(self, engine: int) -> Iterator[Path]:
        number = 0
        while (place := self.engines[engine] / step_tag(number)).is_dir():
            yield place
            number += 1
