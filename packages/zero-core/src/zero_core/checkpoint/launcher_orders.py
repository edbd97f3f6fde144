"""End this process after a step on an order of the launcher: to start again with more ranks, or to save and end.

[Note: launcher orders] The launcher writes an order, one word, to the file `order` in a folder that the ranks of a host
share (`ZERO_LAUNCH_ORDERS`). Each rank reads it once per step and sends it as a request with the messages that the
ranks exchange anyway (see `Watched` in zero-comm), so that all ranks know it after the same step. `regroup` means
leaving after the next checkpoint. `end` means saving one after this step, in the folder of `resume` or, without that,
of the first `save_checkpoint`. A rank that leaves writes the word to `left.RANK` and raises SystemExit(75)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from ..state import TrainingState

logger = logging.getLogger("zero_core")

ORDERS_VARIABLE = "ZERO_LAUNCH_ORDERS"
LEFT_STATUS = 75
_REQUESTS = {"regroup": 1, "end": 2}


class LauncherOrders:
    """Carries out the launcher's orders for one engine. ``folder``: where the orders are; None without a launcher. The
    attribute ``root``, which `resume` and `save_checkpoint` set: where a checkpoint that the launcher asks for is
    saved."""

    def __init__(self, state: TrainingState, folder: Path | None) -> None:
        self._state = state
        self._folder = folder
        self._warned = False
        self.root: str | None = None

    @classmethod
    def of(cls, state: TrainingState, environ: Mapping[str, str] = os.environ) -> LauncherOrders:
        """Return an object for the folder that `ZERO_LAUNCH_ORDERS` names in ``environ``; without that it carries out
        no orders."""
        folder = environ.get(ORDERS_VARIABLE)
        return cls(state, None if not folder else Path(folder))

    def before_step(self) -> None:
        """Read the launcher's order and put it into the messages of the step that begins."""
        if self._folder is not None:
            self._state.groups.control.watched.request = _REQUESTS.get(self._read_order(), 0)

    def after_step(self, save: Callable[[str], object]) -> None:
        """If the ranks have agreed on the order `end`, call ``save`` with `root`, which writes a checkpoint, calls
        `after_checkpoint` and so leaves. Without a `root` warn once and continue."""
        if self._folder is None or self._state.groups.control.watched.agreed < _REQUESTS["end"]:
            return
        if self.root is not None:
            save(self.root)
        elif not self._warned:
            self._warned = True
            logger.warning(
                "the launcher asks for a checkpoint and an end, but neither engine.resume(dir) nor "
                "engine.save_checkpoint(dir) has named a folder: training continues"
            )

    def after_checkpoint(self, wait: Callable[[], object], *, in_memory: bool = False) -> None:
        """If the ranks have agreed to leave, call ``wait``, which returns once the checkpoint is complete, write the
        file `left.RANK`, and raise SystemExit. Collective if they have. ``in_memory``: the checkpoint is only in the
        nodes' memory, which is lost when the job ends: the order `end` then waits for a later one, on disk."""
        state = self._state
        agreed = state.groups.control.watched.agreed if self._folder is not None else 0
        if not agreed or self._folder is None or (in_memory and agreed == _REQUESTS["end"]):
            return
        wait()
        order = next(word for word, request in _REQUESTS.items() if request == agreed)
        if state.reports:
            logger.warning("leaving after step %d, as the launcher asks (%s)", state.counters.global_steps, order)
        state.partition.runtime.agree("leave", order, None)
        (self._folder / f"left.{dist.get_rank()}").write_text(order, encoding="ascii")
        raise SystemExit(LEFT_STATUS)

    def _read_order(self) -> str:
        """Return the launcher's order; empty if there is none."""
        try:
            with open(f"{self._folder}/order", encoding="ascii") as file:
                return file.read()
        except FileNotFoundError:
            return ""
