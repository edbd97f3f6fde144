"""Numbers to Comet, through its own client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import comet_ml

from .protocol import Event


class CometMonitor:
    """Logs to a Comet experiment.

    ``interval``: each name is logged when so many samples have passed since the last time. ``start``: arguments of
    ``comet_ml.start``; those that are None come from Comet's own settings.
    """

    enabled = True

    def __init__(self, *, interval: int, name: str | None, settings: Mapping[str, Any], **start: Any) -> None:
        self._experiment = comet_ml.start(**{key: value for key, value in start.items() if value is not None})
        self._interval = interval
        self._logged: dict[str, int] = {}
        if name is not None:
            self._experiment.set_name(name)
        self._experiment.log_parameters(dict(settings))

    def write_events(self, events: Sequence[Event]) -> None:
        """Log the events that are due."""
        for name, value, samples in events:
            last = self._logged.get(name)
            if last is None or samples - last >= self._interval:
                self._logged[name] = samples
                self._experiment.log_metric(name, value, step=samples)

    def close(self) -> None:
        """End the experiment and wait until it is stored."""
        self._experiment.end()
