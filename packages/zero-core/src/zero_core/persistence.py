"""What an engine writes down, puts away and takes up again: checkpoints, states that wait elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from zero_ckpt import LoadReport

from . import checkpoint
from .audit import Auditor
from .departure import Departure
from .errors import UsageError
from .parking import ParkedStates, kinds_of
from .virtual_ranks import MicroBatches
from .whole_values import WholeValues

if TYPE_CHECKING:
    from .engine import Engine
    from .instruments import Instruments
    from .offloading import Offloading


class Persistence(WholeValues):
    """The part of `Engine` between steps. Every call is collective."""

    load_report: LoadReport | None = None
    _saver: checkpoint.Saver
    _in_memory: checkpoint.InMemory
    _departure: Departure
    offloading: Offloading
    instruments: Instruments
    micro_batches: MicroBatches
    audit: Auditor
    _accumulated: int

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything needed to go on into ``save_dir/tag`` (default ``global_step{N}``), atomically. Collective.

        ``client_state`` is plain data and comes back from `load_checkpoint`. Raises `zero_ckpt.CheckpointError` on
        every rank. With ``checkpoint.writer.decoupled`` it returns once the state is copied into host memory; a save
        that failed then raises from a later `step`, `save_checkpoint`, `load_checkpoint` or `destroy`.
        """
        self._check_open("save_checkpoint")
        if not str(save_dir):
            raise UsageError("save_checkpoint(save_dir): expected a directory, got an empty string")
        self.micro_batches.before("save_checkpoint", self._accumulated)
        name = str(tag) if tag is not None else f"global_step{self.global_steps}"
        root = self.model_part.folder(Path(save_dir))
        with (
            self._engine().told_to_all(),
            self.model_part.together("save_checkpoint"),
            self.instruments.during("save"),
        ):
            self._saver.save(
                self._engine(), root, name, dict(client_state or {}), save_latest, exclude_frozen_parameters
            )
        self.instruments.saved(root / name)
        self._departure.root = self._departure.root or str(save_dir)
        self._departure.after_checkpoint(self._engine(), self._saver.wait)
        return True

    def files_beside(self, client_state: dict[str, Any]) -> dict[str, bytes]:
        """Small files (name to contents) that a checkpoint has beside its own, and which nothing here reads."""
        return {}

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: checkpoint.CustomLoad | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Load ``load_dir/tag`` (default: the newest whole one), written at any world size and stage; return ``(path,
        client_state)``.

        ``custom_load_fn(src=tensors by name, dst=module)`` loads the weights instead of names that fit: it runs on
        every rank with the module whole, and what it leaves there on rank 0 counts. What was loaded, converted,
        defaulted and ignored is in `load_report`.

        Collective. Raises `zero_ckpt.CheckpointError` on every rank: there is never a silent fresh start.
        """
        self._check_open("load_checkpoint")
        self._saver.wait()
        wanted = checkpoint.Wanted(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only and self._sharded is not None,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
            custom=custom_load_fn,
        )
        return self._load(self.model_part.folder(Path(load_dir)), tag, wanted)

    def resume(self, load_dir: str | os.PathLike[str]) -> checkpoint.Resumed | None:
        """Load the newest state of this job and say where training goes on; None, with nothing changed, where there is
        none: a first start.

        It is the newest copy in the nodes' memory (``checkpoint.in_memory``), where one is complete and not older than
        the newest checkpoint in ``load_dir``, else that checkpoint. A copy that is damaged is passed over with a
        warning. At any world size. Collective. Raises `zero_ckpt.CheckpointError` on every rank when there are
        checkpoints and none can be loaded.
        """
        self._check_open("resume")
        self._saver.wait()
        self._departure.root = str(load_dir)
        root = self.model_part.folder(Path(load_dir))
        return checkpoint.resume(self._engine(), self._in_memory, root, self._load_all)

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move this rank's model states to ``device`` ("cpu" or "nvme") until `reload_states`; the engine does nothing
        else meanwhile. Collective.

        ``include``: among `zero_core.parking.KINDS`, by default all. "nvme" is the first `nvme_path` in the
        configuration. ``non_blocking`` is a hint. Raises `UsageError`.
        """
        self._check_open("offload_states")
        kinds = kinds_of(include)
        store = self.offloading.parking_place(str(getattr(device, "value", device)), pin_memory)
        self._partition.runtime.agree("offload states", "", None)
        self._parked = ParkedStates(self._partition, self._sharded, kinds, store)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` took away; nothing happens when nothing is away."""
        if self._parked is not None:
            self._parked.bring_back()
            self._parked = None

    def _load_all(self, root: Path, tag: str | None) -> tuple[str, dict[str, Any]]:
        trained = self._sharded is not None
        return self._load(root, tag, checkpoint.Wanted(strict=True, optimizer=trained, scheduler=True, counters=True))

    def _load(self, root: Path, tag: str | None, wanted: checkpoint.Wanted) -> tuple[str, dict[str, Any]]:
        self.audit.forget()
        with self._engine().told_to_all():
            self.load_report, client_state = checkpoint.load(self._engine(), root, tag, wanted)
        return str(self.load_report.path), client_state

    def _engine(self) -> Engine:
        return cast("Engine", self)
