"""The checkpoints of an engine: the calls that it makes around its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero_ckpt import Checkpoint, LoadReport
from zero_settings import absolute_path

from ..errors import UsageError
from ..failures import Failures
from ..instruments import Instruments
from ..state import TrainingState
from .in_memory import InMemory
from .launcher_orders import LauncherOrders
from .loading import LoadChoice, load
from .notices import Notices
from .periodic import Periodic
from .resuming import Resumed, resume
from .saving import Saver


class Checkpoints:
    """Saves, loads and resumes one engine's state. Every call is collective. Call order around each optimizer step:
    `check_folder`, `before_step`, the step, `step_taken`, `after_step`; all others between steps, and `close` last.
    Writes to states wait, by `Partition.readers`, until running saves have copied them. ``before_load``: called before
    tensors are overwritten. Notices are one rank's news of failed and due saves, which steps carry to all ranks.

    Attributes:
        report: what the last `load` or `resume` did to each name; None before."""

    def __init__(
        self,
        state: TrainingState,
        failures: Failures,
        instruments: Instruments,
        saver: Saver,
        in_memory: InMemory,
        orders: LauncherOrders,
        periodic: Periodic,
        before_load: Callable[[], None],
    ) -> None:
        self.report: LoadReport | None = None
        self._state = state
        self._failures = failures
        self._instruments = instruments
        self._saver = saver
        self._in_memory = in_memory
        self._orders = orders
        self._periodic = periodic
        self._notices = Notices(state.groups.control, saver, in_memory, periodic)
        self._before_load = before_load
        state.partition.readers.add(saver.wait_for_copies)
        state.partition.readers.add(in_memory.wait_for_copies)

    def save(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None,
        client_state: Mapping[str, Any],
        *,
        save_latest: bool,
        exclude_frozen: bool,
    ) -> None:
        """Write ``save_dir/tag`` (None: named for the step). ``save_latest``: name it in the file ``latest``;
        ``exclude_frozen``: leave frozen parameters out. If the launcher has ordered the ranks to leave, also wait until
        the checkpoint is complete and raise SystemExit. Raises `UsageError` inside a step or without a folder,
        `zero_ckpt.CheckpointError` for a save that failed."""
        state = self._state
        state.check_open("save_checkpoint")
        state.partition.runtime.reopen("save_checkpoint")
        if not str(save_dir):
            raise UsageError("save_checkpoint(save_dir): expected a directory, got an empty string")
        state.micro_batches.check_between_steps("save_checkpoint", state.counters.accumulated)
        name = str(tag) if tag is not None else f"global_step{state.counters.global_steps}"
        root = state.model_part.folder(Path(save_dir), make=True)
        with (
            self._failures.abort_all_on_failure(),
            state.model_part.share_failure("save_checkpoint"),
            self._instruments.during("save"),
        ):
            if state.optimizer is not None:
                state.optimizer.learn_deferred()
            self._saver.save(root, name, client_state, save_latest=save_latest, exclude_frozen=exclude_frozen)
        self._instruments.saved(root / name)
        self._orders.root = self._orders.root or os.path.abspath(save_dir)
        self._orders.after_checkpoint(self._saver.wait)

    def load(self, load_dir: str | os.PathLike[str], tag: str | None, wanted: LoadChoice) -> tuple[str, dict[str, Any]]:
        """Load ``load_dir/tag`` (None: the newest complete checkpoint) once running saves are written; return its path
        and the user's client state. Raises `zero_ckpt.CheckpointError`."""
        self._state.check_open("load_checkpoint")
        self._saver.wait()
        root = self._state.model_part.folder(Path(load_dir))
        return self._load(root, tag, wanted, choice=f"{root}/{tag or ''}{wanted}")

    def resume(self, load_dir: str | os.PathLike[str]) -> Resumed | None:
        """Load the newest state, from node memory or ``load_dir``; return where it continues, None if there is none.
        Waits for running saves first; automatic saves use ``load_dir`` from then on. Collective. Raises
        `zero_ckpt.CheckpointError` on every rank when there are checkpoints and none can be loaded."""
        self._state.check_open("resume")
        runtime = self._state.partition.runtime
        runtime.reopen("resume")
        with self._failures.abort_all_on_failure():
            run = absolute_path(load_dir)
            runtime.agree("resume", "", None)
        self.wait()
        self._orders.root = run
        root = self._state.model_part.folder(Path(load_dir))
        return resume(self._state, self._in_memory, root, self._load_everything, run=run)

    def check_folder(self) -> None:
        """Raise `UsageError` if the configuration asks for saves or copies at steps and no folder for them is known."""
        self._periodic.check(self._orders.root)
        self._in_memory.check(self._orders.root)

    def before_step(self) -> None:
        """Put the launcher's order and this rank's notices into the messages that the ranks exchange in the step."""
        self._orders.before_step()
        self._notices.before_step(leads=self._state.reports)

    def step_taken(self) -> None:
        """Read all ranks' notices, which came with the messages of the step."""
        self._notices.after_step()

    def after_step(self) -> None:
        """Raise errors of background saves, if any rank announced one; copy into node memory and save if due; save and
        leave if the launcher asks. Raises `zero_ckpt.CheckpointError` for a failed save, and SystemExit to leave."""
        self._notices.check()
        if self._in_memory.after_step(self._orders.root):
            self._orders.after_checkpoint(self._in_memory.wait, in_memory=True)
        self._periodic.after_step(self._save, self._orders.root, due=self._notices.due)
        self._orders.after_step(self._save)

    def wait(self) -> None:
        """Wait until all saves that were started are written. Raises `zero_ckpt.CheckpointError` if one failed."""
        self._saver.wait()
        self._in_memory.wait()

    def close(self) -> None:
        """Wait until all saves that were started are written, and end their threads. Raises `zero_ckpt.CheckpointError`
        if one failed."""
        self._saver.close()
        self._in_memory.close()

    def _save(self, root: str) -> None:
        """Save below ``root`` under the step's name, without client state: the save that steps make by themselves."""
        self.save(root, None, {}, save_latest=True, exclude_frozen=False)

    def _load_everything(self, root: Path, tag: str | None, opened: Checkpoint | None) -> tuple[str, dict[str, Any]]:
        """Load all of ``root/tag`` that this engine has; return its path and client state. ``opened``: it, if open."""
        wanted = LoadChoice(True, self._state.optimizer is not None, scheduler=True, counters=True, opened=opened)
        return self._load(root, tag, wanted, choice=tag or str(root))  # each node has node memory elsewhere

    def _load(self, root: Path, tag: str | None, wanted: LoadChoice, *, choice: str) -> tuple[str, dict[str, Any]]:
        """Load what is ``wanted`` of ``root/tag``, also into an engine that a failure has ended; return its path and
        client state. ``choice``: text on what is loaded, which must be equal on all ranks."""
        runtime = self._state.partition.runtime
        runtime.reopen("load_checkpoint")
        self._before_load()
        with self._failures.abort_all_on_failure(), runtime.writing("load_checkpoint", weights=True):
            runtime.agree("load", choice, None)
            self.report, client_state = load(self._state, root, tag, wanted)
        return str(self.report.path), client_state
