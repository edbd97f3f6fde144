"""`deepspeed.monitor`: outputs for metrics by DeepSpeed's names, over those of zero_core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from zero_core.monitors import Event, build_monitor, check_clients
from zero_settings import Config

from .settings import load_config

SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet")
"""The sections of a configuration that say where metrics go."""


class MonitorConfig:
    """The sections of a configuration that say where metrics go (`SECTIONS`), each an attribute of that name, and
    whether any is ``enabled``.

    ``sections``: name -> values as in a configuration; defaults for those left out. Raises `ConfigError`.
    """

    def __init__(self, **sections: Mapping[str, Any]) -> None:
        resolved = load_config({**sections, "train_micro_batch_size_per_gpu": 1}, 1)
        self.resolved: Config = resolved
        self.enabled = any(getattr(resolved, section).enabled for section in SECTIONS)
        for section in SECTIONS:
            setattr(self, section, getattr(resolved, section))


def get_monitor_config(param_dict: Mapping[str, Any]) -> MonitorConfig:
    """Return the monitor sections of a configuration (`SECTIONS`), with defaults for those that it lacks. Raises
    `ConfigError`."""
    return MonitorConfig(**{section: param_dict[section] for section in SECTIONS if section in param_dict})


class MonitorMaster:
    """Writes events to the outputs that a configuration enables, on rank 0 alone.

    ``monitor_config``: from `get_monitor_config`. Raises ImportError where an enabled output's client is not installed.

    Attributes:
        enabled: whether any output is.
    """

    def __init__(self, monitor_config: MonitorConfig) -> None:
        check_clients(monitor_config.resolved)
        self.monitor_config = monitor_config
        self.enabled = monitor_config.enabled
        self._monitor = build_monitor(monitor_config.resolved, dist.get_rank() if dist.is_initialized() else 0)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write the events, (name, value, number of samples trained so far) each, to all enabled outputs; do nothing on
        ranks other than 0."""
        self._monitor.write_events(event_list)


class _OneMonitor(MonitorMaster):
    """A `MonitorMaster` for one section of the configuration, which a subclass names as ``section``. ``config``: the
    section's values, a mapping or a resolved section; they are attributes too, except an API key. Nothing is written
    if the section is not enabled.
    """

    section = ""

    def __init__(self, config: Any) -> None:
        values = config if isinstance(config, Mapping) else config.model_dump()
        super().__init__(MonitorConfig(**{self.section: dict(values)}))
        for name, value in getattr(self.monitor_config, self.section).model_dump().items():
            if name != "api_key":
                setattr(self, name, value)


class TensorBoardMonitor(_OneMonitor):
    """Writes to TensorBoard. Named as DeepSpeed's; ``config``: the section ``tensorboard``."""

    section = "tensorboard"


class WandbMonitor(_OneMonitor):
    """Writes to Weights & Biases. Named as DeepSpeed's; ``config``: the section ``wandb``."""

    section = "wandb"


class csvMonitor(_OneMonitor):
    """Writes to CSV files. Named as DeepSpeed's; ``config``: the section ``csv_monitor``."""

    section = "csv_monitor"


class CometMonitor(_OneMonitor):
    """Writes to Comet. Named as DeepSpeed's; ``config``: the section ``comet``."""

    section = "comet"
