"""Keep a dry run from using this machine: configuration without output, no memory limits, files without content."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_core.engine import Engine
from zero_core.supervision import Unsupervised
from zero_core.training import Observer, Unobserved
from zero_offload import HostBudget
from zero_offload.ends import HostUse
from zero_settings import Config, read

from ..errors import PlanError
from ..planned import FileRow, LiveRow
from .memory import LiveMemory

if TYPE_CHECKING:
    from zero_nvme_aio.dry_run import DryRunEngine

_MONITORS = ("comet", "comms_logger", "csv_monitor", "flops_profiler", "tensorboard", "wandb")
_LEFT_OUT = (
    "aio",
    "audit_every",
    "checkpoint",
    "dump_state",
    "memory_breakdown",
    "run_record",
    "timers",
    "wall_clock_breakdown",
)


class DryRunSupervisor(Unsupervised):
    """A `zero_core.supervision.Supervisor` of a dry run's engines: they print, log and save nothing, and this machine's
    memory does not limit them.

    ``folder``: for files without content in place of those on NVMe.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def config(self, given: Any, world_size: int) -> dict[str, Any]:
        """Return the configuration for an engine of the dry run: ``given`` without the settings of monitors, logs,
        records and checkpoints (except their writer), and with new folders below `folder` in place of the NVMe paths of
        optimizer states and parameters. Warns of settings left out that take memory.
        """
        raw = read(given.raw if isinstance(given, Config) else given)
        _warn_of_uncounted(raw)
        plain: dict[str, Any] = {key: value for key, value in raw.items() if key not in _LEFT_OUT}
        checkpoint: Any = raw.get("checkpoint")
        if isinstance(checkpoint, dict) and "writer" in checkpoint:
            plain["checkpoint"] = {"writer": checkpoint["writer"]}
        zero: Any = plain.get("zero_optimization")
        for name in ("offload_optimizer", "offload_param"):
            section = zero.get(name) if isinstance(zero, dict) else None
            if isinstance(section, dict) and section.get("device") == "nvme" and section.get("nvme_path"):
                paths = section["nvme_path"]
                folders = self._stand_in_folders([paths] if isinstance(paths, str) else paths)
                zero = plain["zero_optimization"] = {**zero, name: {**section, "nvme_path": folders}}
        return {**plain, "steps_per_print": 0, **{section: {"enabled": False} for section in _MONITORS}}

    def budget(self, processes: int) -> HostBudget:
        """Return a budget without limits of this host's memory and disk. ``processes``: the ranks that share
        the host.
        """
        return HostBudget(limits={"memory": (), "locked": (), "shared": (), "disk": ()}, processes=processes)

    def observer(self, engine: Engine) -> Observer:
        """Return an observer of ``engine`` that does nothing. Raises `PlanError` for a configuration that cannot be
        planned.
        """
        _refuse_unplannable(engine.resolved_config)
        return Unobserved()

    def _stand_in_folders(self, paths: Sequence[str]) -> list[str]:
        """Make one folder below `folder` for each of ``paths``, NVMe paths of the configuration, and return the
        folders' paths.
        """
        found = [self.folder / str(number) for number in range(len(paths))]
        for path in found:
            path.mkdir(exist_ok=True)
        return [str(path) for path in found]


def _warn_of_uncounted(raw: Mapping[str, Any]) -> None:
    """Warn of each setting in the configuration ``raw`` that takes memory which is not in a plan."""
    checkpoint = raw.get("checkpoint")
    copies = checkpoint.get("in_memory") if isinstance(checkpoint, dict) else None
    if isinstance(copies, dict) and copies.get("every"):
        warnings.warn(
            "zero-plan: checkpoint.in_memory is not in this plan. While a copy is made a node's memory holds the new "
            "one and the last complete one, each with masters and states of its own ranks and, from two nodes on, of a "
            "neighbour's.",
            stacklevel=2,
        )
    if raw.get("audit_every"):
        warnings.warn(
            "zero-plan: audit_every is not in this plan. In an audited step the device also holds the inputs of one "
            "unit's call, its gradient and its recomputed activations, whose choice depends on the step.",
            stacklevel=2,
        )


class PlannedEnds:
    """Provides the tiers with host memory that ``memory`` tracks, and with files that have a length and no content; a
    `zero_offload.ends.TierEnds`.
    """

    def __init__(self, memory: LiveMemory) -> None:
        self._memory = memory
        self._engine: DryRunEngine | None = None

    def host_memory(self, nbytes: int, use: HostUse) -> torch.Tensor:
        """Return ``nbytes`` of tracked host memory as uint8, a fake tensor inside a `PlanMode`."""
        with self._memory.assigning(memory_tier_of(use), owner_rows(use)):
            return torch.zeros(nbytes, dtype=torch.uint8)

    def io_engine(self, given: Any) -> DryRunEngine:
        """Return the I/O engine of files without content that all stores of this dry run share; ``given`` is
        ignored.
        """
        from zero_nvme_aio.dry_run import DryRunEngine

        self._engine = self._engine or DryRunEngine()
        return self._engine

    def files(self) -> tuple[FileRow, ...]:
        """Return the names and lengths of the tiers' files, sorted by name."""
        lengths = {} if self._engine is None else self._engine.lengths()
        return tuple(sorted(FileRow(Path(path).name, nbytes) for path, nbytes in lengths.items()))

    def bytes_moved(self) -> tuple[int, int]:
        """Return the bytes (read from files, written to files) since the start of the dry run."""
        counters = {"bytes_read": 0, "bytes_written": 0} if self._engine is None else self._engine.counters()
        return counters["bytes_read"], counters["bytes_written"]


def memory_tier_of(use: HostUse) -> str:
    """Return the tier, as a key of `LiveMemory.now`, of host memory that is allocated for ``use``."""
    if use.on_device:
        return "device"
    return "pinned host" if use.pin else "pageable host"


def owner_rows(use: HostUse) -> tuple[LiveRow, ...]:
    """Return the owners of host memory that is allocated for ``use``, and the bytes of each."""
    return tuple(LiveRow(use.purpose, *part) for part in use.parts) or (LiveRow(use.purpose, "", 0),)


def _refuse_unplannable(config: Config) -> None:
    """Raise `PlanError` if ``config`` has a setting that a dry run does not support."""
    if config.offload.activations.device != "none":
        raise PlanError('offload.activations.device: expected "none" for a dry run; their traffic is not tracked')
    if config.offload.delayed_update:
        raise PlanError("offload.delayed_update: expected false for a dry run; its thread would use real memory")
    if config.zero_optimization.offload_optimizer.overlap != "off":
        path = "zero_optimization.offload_optimizer.overlap"
        raise PlanError(f'{path}: expected "off" for a dry run; its thread would use real memory')
