"""From the configuration to a monitor."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .csv_files import CsvMonitor
from .protocol import Monitor, Monitors, NoMonitor

if TYPE_CHECKING:
    from zero_core.config import Config

_CLIENTS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Section, which is also the name of the extra -> the client's module."""


def check_clients(config: Config) -> None:
    """Raise ImportError when the client of an enabled monitor is not installed; every rank asks and raises."""
    for section, module in _CLIENTS.items():
        if getattr(config, section).enabled and find_spec(module) is None:
            raise ImportError(
                f"{section}.enabled needs the package {module!r}: pip install 'zero-core[{section}]'", name=module
            )


def build_monitor(config: Config, rank: int) -> Monitor:
    """The monitors that ``config`` enables; on other ranks than 0 one that takes nothing."""
    monitors = _enabled(config) if rank == 0 else []
    if not monitors:
        return NoMonitor()
    return monitors[0] if len(monitors) == 1 else Monitors(monitors)


def _enabled(config: Config) -> list[Monitor]:
    monitors: list[Monitor] = []
    settings = {key: value for key, value in config.raw.items() if key != "comet"}  # that section may hold a secret
    if config.csv_monitor.enabled:
        monitors.append(CsvMonitor(Path(config.csv_monitor.output_path) / config.csv_monitor.job_name))
    if config.tensorboard.enabled:
        from .tensorboard_files import TensorBoardMonitor

        monitors.append(TensorBoardMonitor(Path(config.tensorboard.output_path) / config.tensorboard.job_name))
    if config.wandb.enabled:
        from .wandb_run import WandbMonitor

        section = config.wandb
        monitors.append(
            WandbMonitor(project=section.project, group=section.group, team=section.team, settings=settings)
        )
    if config.comet.enabled:
        from .comet_experiment import CometMonitor

        comet = config.comet
        monitors.append(
            CometMonitor(
                interval=comet.samples_log_interval,
                name=comet.experiment_name,
                settings=settings,
                api_key=comet.api_key,
                project=comet.project,
                workspace=comet.workspace,
                experiment_key=comet.experiment_key,
                online=comet.online,
                mode=comet.mode,
            )
        )
    return monitors
