"""Say what a training script probably did not mean: a wrapped model, a step without gradients, a state dict without
values."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .errors import PartitionError

logger = logging.getLogger("zero_partition")


def refuse_wrapped(model: nn.Module) -> None:
    """Raise `PartitionError` if ``model`` is or holds a `DataParallel` or `DistributedDataParallel`, which the error
    names: these average gradients by themselves."""
    for name, module in model.named_modules():
        if isinstance(module, DataParallel | DistributedDataParallel):
            what = f"'{name}'" if name else "the model"
            raise PartitionError(
                f"{what} is wrapped in {type(module).__name__}, which replicates parameters and averages gradients; so "
                "does the engine. Give the module inside it, `.module`"
            )


class Hints:
    """Warnings that one partition logs, each once, on rank 0. A public method is called when something happens that may
    deserve one."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def stepped(self, step: int, touched: Mapping[int, Sequence[bool]]) -> None:
        """Warn, if no parameter has a gradient, that optimizer step ``step`` changes nothing. ``touched``: by unit
        index, for each parameter, whether any rank has a gradient."""
        if not any(map(any, touched.values())):
            self._warn(
                "step",
                f"step {step}: no parameter has a gradient on any rank, so no weight changes. Call backward(loss) "
                "before each step()",
            )

    def hollow(self, name: str) -> None:
        """Warn that the entry ``name`` of a state dict has no values, as its parameter is released and not gathered."""
        self._warn(
            "state dict",
            f"state_dict(): '{name}' is sharded and not gathered, so its entry is a meta tensor, and a file of this "
            "state dict holds no values of it. Call engine.save_checkpoint, or take the state dict inside "
            "engine.gathered(model.parameters())",
        )

    def _warn(self, key: str, text: str) -> None:
        """Log ``text`` on rank 0, unless a warning with this ``key`` was given before."""
        if key not in self._given and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning("%s", text)
        self._given.add(key)
