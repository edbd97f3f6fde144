"""Leave after a step because the launcher asks for it: to meet again with more ranks, or to save and end.

[Note: departure] The launcher leaves a word in a file of a folder that the ranks of one host share
(`ZERO_LAUNCH_ORDERS`). A rank looks for it once a step. What it finds goes as a wish with the messages that ranks
exchange anyway (see `Watched` in zero-comm), so that all ranks know of it after the same step. `regroup` means leaving
after the next checkpoint; `end` means saving one after this step, in the folder of `resume` or, without that, of the
first `save_checkpoint`. A rank that leaves writes the word into `left.RANK` and ends with status 75, by a SystemExit.
"""

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
_WISHES = {"regroup": 1, "end": 2}


class Departure:
    """Carries out the launcher's orders for one engine. ``folder``: where they come; None where no launcher gives any.

    ``root``: where a checkpoint goes that the launcher asks for; set by `resume` and `save_checkpoint`.
    """

    def __init__(self, state: TrainingState, folder: Path | None) -> None:
        self._state = state
        self._folder = folder
        self._told = False
        self.root: str | None = None

    @classmethod
    def of(cls, state: TrainingState, environ: Mapping[str, str] = os.environ) -> Departure:
        """As the environment says."""
        folder = environ.get(ORDERS_VARIABLE)
        return cls(state, None if not folder else Path(folder))

    def before_step(self) -> None:
        """Look for an order; it goes with this step's messages."""
        if self._folder is not None:
            self._state.groups.control.watched.wish = _WISHES.get(self._order(), 0)

    def after_step(self, save: Callable[[str], object]) -> None:
        """Save and leave when the ranks have agreed to end. ``save`` writes a checkpoint and leaves."""
        if self._folder is None or self._state.groups.control.watched.agreed < _WISHES["end"]:
            return
        if self.root is not None:
            save(self.root)
        elif not self._told:
            self._told = True
            logger.warning(
                "the launcher asks for a checkpoint and an end, but neither engine.resume(dir) nor "
                "engine.save_checkpoint(dir) has named a folder: training goes on"
            )

    def after_checkpoint(self, wait: Callable[[], object]) -> None:
        """Leave when the ranks have agreed to; ``wait`` returns when the checkpoint is complete. Raises SystemExit."""
        state = self._state
        agreed = state.groups.control.watched.agreed if self._folder is not None else 0
        if not agreed or self._folder is None:
            return
        wait()
        order = next(word for word, wish in _WISHES.items() if wish == agreed)
        if state.reports:
            logger.warning("leaving after step %d, as the launcher asks (%s)", state.counters.global_steps, order)
        state.partition.runtime.agree("leave", order, None)
        (self._folder / f"left.{dist.get_rank()}").write_text(order, encoding="ascii")
        raise SystemExit(LEFT_STATUS)

    def _order(self) -> str:
        try:
            with open(f"{self._folder}/order", encoding="ascii") as file:
                return file.read()
        except FileNotFoundError:
            return ""
