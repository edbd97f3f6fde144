"""Write metrics to CSV files, TensorBoard, Weights & Biases or Comet, whose clients are imported on rank 0 alone. An
event is one value of a metric: (name, value, number of samples seen so far)."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from zero_settings import absolute_path

if TYPE_CHECKING:
    from zero_settings import Config

Event = tuple[str, float, int]
"""A name such as ``Train/Samples/train_loss``, a value, and the number of samples seen so far."""


class Monitor(Protocol):
    """Writes the metrics of a run. Call order: `write_events`, with numbers of samples that never decrease; `close`."""

    @property
    def enabled(self) -> bool:
        """Return whether events are written at all."""

    def write_events(self, events: Sequence[Event]) -> None:
        """Write ``events``, which are all of one optimizer step."""

    def close(self) -> None:
        """Flush and close the outputs."""


class NoMonitor:
    """A `Monitor` that writes nothing, for a configuration without monitors and for other ranks than 0."""

    enabled = False

    def write_events(self, events: Sequence[Event]) -> None: ...
    def close(self) -> None: ...


class Monitors:
    """A `Monitor` that passes events on to each of ``monitors``."""

    enabled = True

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors = list(monitors)

    def write_events(self, events: Sequence[Event]) -> None:
        """Write ``events`` to every monitor."""
        for monitor in self._monitors:
            monitor.write_events(events)

    def close(self) -> None:
        """Close every monitor."""
        for monitor in self._monitors:
            monitor.close()


class CsvMonitor:
    """A `Monitor` that appends to ``folder/Train_Samples_train_loss.csv`` and so on, one file per metric, with the
    columns step (samples) and the name's last part. Raises OSError when ``folder`` cannot be written."""

    enabled = True

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, TextIO] = {}

    def write_events(self, events: Sequence[Event]) -> None:
        """Append a line (samples, value) to the file of each event's metric, and flush it."""
        for name, value, samples in events:
            file = self._files.get(name) or self._open(name)
            csv.writer(file, lineterminator="\n").writerow([samples, value])
            file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, name: str) -> TextIO:
        """Open, keep and return the file of the metric ``name``, for appending; write its header if it is empty."""
        path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
        file = path.open("a", encoding="utf-8", newline="")
        if file.tell() == 0:
            csv.writer(file, lineterminator="\n").writerow(["step", name.rpartition("/")[2]])
        self._files[name] = file
        return file


class TensorBoardMonitor:
    """A `Monitor` that writes scalars to event files in ``folder``."""

    enabled = True

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder))

    def write_events(self, events: Sequence[Event]) -> None:
        """Write one scalar per event, at its number of samples, and flush."""
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbMonitor:
    """A `Monitor` that logs to a new run of Weights & Biases; WANDB_MODE, WANDB_DIR and so on in the environment apply.
    ``settings``: the configuration to show with the run. Other arguments: of `wandb.init`, whose entity is ``team``."""

    enabled = True

    def __init__(self, *, project: str, group: str | None, team: str | None, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project=project, group=group, entity=team, config=dict(settings))

    def write_events(self, events: Sequence[Event]) -> None:
        """Log the events, in one call those with the same number of samples, which is the step."""
        steps: dict[int, dict[str, float]] = {}
        for name, value, samples in events:
            steps.setdefault(samples, {})[name] = value
        for samples, values in steps.items():
            self._run.log(values, step=samples)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class CometMonitor:
    """A `Monitor` that logs to a Comet experiment. ``interval``: the least number of samples between two logged events
    of one metric. ``name``: the experiment's, None for Comet's own. ``settings``: the configuration to show with it.
    ``start``: arguments of ``comet_ml.start``; None means Comet's own setting."""

    enabled = True

    def __init__(self, *, interval: int, name: str | None, settings: Mapping[str, Any], **start: Any) -> None:
        import comet_ml

        self._experiment = comet_ml.start(**{key: value for key, value in start.items() if value is not None})
        self._interval = interval
        self._logged: dict[str, int] = {}
        if name is not None:
            self._experiment.set_name(name)
        self._experiment.log_parameters(dict(settings))

    def write_events(self, events: Sequence[Event]) -> None:
        """Log events, except those of a metric that was logged less than ``interval`` samples ago."""
        for name, value, samples in events:
            last = self._logged.get(name)
            if last is None or samples - last >= self._interval:
                self._logged[name] = samples
                self._experiment.log_metric(name, value, step=samples)

    def close(self) -> None:
        """End the experiment and wait until it is uploaded."""
        self._experiment.end()


_CLIENTS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Client module by configuration section, which is also the name of the extra."""


def check_clients(config: Config) -> None:
    """Raise ImportError, on every rank, if the client library of a monitor that ``config`` enables is missing."""
    for section, module in _CLIENTS.items():
        if getattr(config, section).enabled and find_spec(module) is None:
            raise ImportError(
                f"{section}.enabled needs the package {module!r}: pip install 'zero-core[{section}]'", name=module
            )


def build_monitor(config: Config, rank: int) -> Monitor:
    """Return the monitor that writes wherever ``config`` enables it; a `NoMonitor` on ranks other than 0."""
    monitors = _enabled(config) if rank == 0 else []
    if not monitors:
        return NoMonitor()
    return monitors[0] if len(monitors) == 1 else Monitors(monitors)


def _enabled(config: Config) -> list[Monitor]:
    """Construct and return the monitors whose sections ``config`` enables, which opens their files and connections."""
    monitors: list[Monitor] = []
    settings = {key: value for key, value in config.raw.items() if key != "comet"}  # that section may hold a secret
    if config.csv_monitor.enabled:
        monitors.append(CsvMonitor(Path(absolute_path(config.csv_monitor.output_path), config.csv_monitor.job_name)))
    if config.tensorboard.enabled:
        folder = Path(absolute_path(config.tensorboard.output_path))
        monitors.append(TensorBoardMonitor(folder / config.tensorboard.job_name))
    if config.wandb.enabled:
        section = config.wandb
        monitors.append(
            WandbMonitor(project=section.project, group=section.group, team=section.team, settings=settings)
        )
    if config.comet.enabled:
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
