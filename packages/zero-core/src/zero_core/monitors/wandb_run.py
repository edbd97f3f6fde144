"""Numbers to Weights & Biases, through its own client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from .protocol import Event


class WandbMonitor:
    """Logs to a new run. What the client reads from the environment (WANDB_MODE, WANDB_DIR …) holds.

    ``settings``: the run's configuration, shown beside it.
    """

    enabled = True

    def __init__(self, *, project: str, group: str | None, team: str | None, settings: Mapping[str, Any]) -> None:
        self._run = wandb.init(project=project, group=group, entity=team, config=dict(settings))

    def write_events(self, events: Sequence[Event]) -> None:
        """Log all events of one number of samples together."""
        steps: dict[int, dict[str, float]] = {}
        for name, value, samples in events:
            steps.setdefault(samples, {})[name] = value
        for samples, values in steps.items():
            self._run.log(values, step=samples)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
