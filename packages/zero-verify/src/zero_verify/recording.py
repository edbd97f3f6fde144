"""Read the recording of one run: one checkpoint per engine and step. Engines are numbered from 0, in the order in which
the script made them, and so are the steps of each. A ``kind`` of tensor is "gradient" or "weight" (after the step)."""

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
    """Return the folder for the steps of one of the script's engines, below ``folder``, that of the recording.
    ``number``: the engine's; ``part``: which part of the model it trains under an mpu, from 0; None without one."""
    return folder / (f"engine {number:03d}" if part is None else f"engine {number:03d} part {part:03d}")


def step_tag(step: int) -> str:
    """Return the checkpoint tag of a step, such as "step00003"."""
    return f"step{step:05d}"


class Step:
    """One step of one engine: each value is read from ``checkpoint`` when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def config(self) -> dict[str, Any]:
        """Return the engine's resolved configuration as plain data."""
        config: dict[str, Any] = self._checkpoint.config
        return config

    @property
    def norm(self) -> float:
        """Return the global gradient norm before clipping."""
        return float(self._checkpoint.client_state["norm"])

    @property
    def taken(self) -> bool:
        """Return whether the optimizer took the step, which updates the weights, or skipped it."""
        return bool(self._checkpoint.client_state["taken"])

    @property
    def losses(self) -> list[list[float]]:
        """Return the losses given to `engine.backward` in this step: a list for each rank, with one per micro-batch."""
        return [list(state["losses"]) for state in self._checkpoint.rank_state]

    @cached_property
    def reads(self) -> dict[tuple[int, str], list[str]]:
        """Return digests of the weights that modules' forwards read in this step, by (rank, parameter name): one digest
        per read, in order, over all micro-batches.

        Reads in compiled regions and without gradients are not recorded; a weight without a recorded read has no
        entry."""
        found: dict[tuple[int, str], list[str]] = {}
        for rank, state in enumerate(self._checkpoint.rank_state):
            for name, digest in state["reads"]:
                found.setdefault((rank, name), []).append(digest)
        return found

    def names(self, kind: str) -> list[str]:
        """Return the names of the parameters that have a tensor of ``kind``, in the model's order."""
        return [name for name in self._checkpoint.client_state["names"] if (name, kind) in self._checkpoint.tensors]

    def tensor(self, kind: str, name: str) -> torch.Tensor:
        """Return the full tensor of ``kind`` of the parameter ``name``, on the CPU. Raises `zero_ckpt.CheckpointError`
        if the checkpoint has none."""
        entry = self._checkpoint.entry(name, kind)
        out = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        self._checkpoint.read_into(name, kind, 0, tensor_buffer(out))
        return out


class Recording:
    """A recorded run; ``folder``: where it was recorded. An engine is given by its index in `engines`.

    Attributes:
        engines: for each engine of the script that trained (and each part of its model), the folder of its steps."""

    def __init__(self, folder: Path) -> None:
        self.engines = sorted(folder.glob("engine *"))

    def count(self, engine: int) -> int:
        """Return the number of recorded steps of one engine, counted from step 0 to the first that is missing."""
        return sum(1 for _ in self._step_folders(engine))

    def steps(self, engine: int) -> Iterator[Step]:
        """Yield the recorded steps of one engine in order, from step 0 to the first that is missing. Raises
        `zero_ckpt.CheckpointError` for a step that cannot be opened."""
        for place in self._step_folders(engine):
            yield Step(open_checkpoint(place))

    def _step_folders(self, engine: int) -> Iterator[Path]:
        """Yield the checkpoint folders of one engine's steps in order, from step 0 to the first that is missing."""
        number = 0
        while (place := self.engines[engine] / step_tag(number)).is_dir():
            yield place
            number += 1
