"""Keep a dry run off this machine: its configuration, memory budget, host memory, and files without content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_config import Config, read
from zero_core.engine import Engine
from zero_core.supervision import Unsupervised
from zero_core.training import Observer, Unobserved
from zero_offload import HostBudget
from zero_offload.ends import HostUse

from ..errors import PlanError
from ..planned import FileRow, LiveRow
from .memory import LiveMemory

if TYPE_CHECKING:
    from zero_nvme_aio.rehearsal import RehearsedEngine

_MONITORS = ("comet", "comms_logger", "csv_monitor", "flops_profiler", "tensorboard", "wandb")
_LEFT_OUT = (
    "aio",
    "audit_every",
    "checkpoint",
    "dump_state",
    "memory_breakdown",
    "run_record",
    "steps_per_print",
    "timers",
    "wall_clock_breakdown",
)


class Rehearsal(Unsupervised):
    """Supervises the engines of a dry run: nothing is printed, written or saved, and this machine's memory is no
    limit.

    ``folder``: where files without content stand in for those on NVMe, and may for others.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def config(self, given: Any, world_size: int) -> dict[str, Any]:
        """Return the configuration given, without its monitors, records and checkpoints, and with folders of this
        machine in the place of those on NVMe."""
        raw = read(given.raw if isinstance(given, Config) else given)
        plain: dict[str, Any] = {key: value for key, value in raw.items() if key not in _LEFT_OUT}
        zero: Any = plain.get("zero_optimization")
        for name in ("offload_optimizer", "offload_param"):
            section = zero.get(name) if isinstance(zero, dict) else None
            if isinstance(section, dict) and section.get("device") == "nvme" and section.get("nvme_path"):
                paths = section["nvme_path"]
                stands_in = {**section, "nvme_path": self._folders([paths] if isinstance(paths, str) else paths)}
                zero = plain["zero_optimization"] = {**zero, name: stands_in}
        return {**plain, **{section: {"enabled": False} for section in _MONITORS}}

    def budget(self, processes: int) -> HostBudget:
        """Return a budget without limits."""
        return HostBudget(limits={"memory": (), "locked": (), "shared": (), "disk": ()}, processes=processes)

    def observer(self, engine: Engine) -> Observer:
        """Return one that takes no notice. Raises `PlanError` for a configuration that cannot be planned."""
        _refuse(engine.resolved_config)
        return Unobserved()

    def _folders(self, paths: Sequence[str]) -> list[str]:
        found = [self.folder / str(number) for number in range(len(paths))]
        for path in found:
            path.mkdir(exist_ok=True)
        return [str(path) for path in found]


class PlannedEnds:
    """Stands in for the system under the tiers (see `zero_offload.ends.TierEnds`): host memory is followed by
    ``memory`` and files have lengths only."""

    def __init__(self, memory: LiveMemory) -> None:
        self._memory = memory
        self._engine: RehearsedEngine | None = None

    def host_memory(self, nbytes: int, use: HostUse) -> torch.Tensor:
        """Return host memory that is followed; fake where torch makes fake tensors."""
        with self._memory.taking(tier_of(use), rows_of(use)):
            return torch.zeros(nbytes, dtype=torch.uint8)

    def io_engine(self, given: Any) -> RehearsedEngine:
        """Return the one engine of all stores of this dry run."""
        from zero_nvme_aio.rehearsal import RehearsedEngine

        self._engine = self._engine or RehearsedEngine()
        return self._engine

    def files(self) -> tuple[FileRow, ...]:
        """Return the files that there are now."""
        lengths = {} if self._engine is None else self._engine.lengths()
        return tuple(sorted(FileRow(Path(path).name, nbytes) for path, nbytes in lengths.items()))

    def moved(self) -> tuple[int, int]:
        """Return the bytes read from files and written to them so far."""
        counters = {"bytes_read": 0, "bytes_written": 0} if self._engine is None else self._engine.counters()
        return counters["bytes_read"], counters["bytes_written"]


def tier_of(use: HostUse) -> str:
    """Return the tier that a block of host memory counts to."""
    if use.on_device:
        return "device"
    return "pinned host" if use.pin else "pageable host"


def rows_of(use: HostUse) -> tuple[LiveRow, ...]:
    """Return the owners of a block of host memory."""
    return tuple(LiveRow(use.purpose, *part) for part in use.parts) or (LiveRow(use.purpose, "", 0),)


def _refuse(config: Config) -> None:
    if config.offload.activations.device != "none":
        raise PlanError('offload.activations.device: expected "none" for a dry run; their traffic is not followed yet')
    if config.offload.delayed_update:
        raise PlanError(
            "offload.delayed_update: expected false for a dry run; a thread beside it would use real memory"
        )
