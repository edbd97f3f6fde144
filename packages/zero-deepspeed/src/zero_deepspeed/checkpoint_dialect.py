"""What a checkpoint of the engine has besides `zero_core.Engine`'s, for scripts of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero_ckpt import save_sharded
from zero_core.state import TrainingState

from . import VERSION
from .checkpoint_format import DeepSpeedWriter
from .client_state import from_plain, to_plain
from .state_files import state_files


class CheckpointNames:
    """Chooses a checkpoint's format and adds to it what scripts of DeepSpeed expect: the engine's
    `zero_core.checkpoint.Dialect`, whose methods a save calls.

    ``config``: the configuration as the user gave it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def writer(self, state: TrainingState) -> Callable[..., Path]:
        """Return the function that writes checkpoints in the configured format: `zero_ckpt.save_sharded` for "native",
        a `DeepSpeedWriter`, which is called alike, for "deepspeed". ``state``: of the engine that saves. Raises
        `UsageError` if that format cannot hold the state, as `DeepSpeedWriter` says."""
        return save_sharded if state.config.checkpoint.format == "native" else DeepSpeedWriter(state, self._config)

    def client_state(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the user's client state ``given`` as plain data (see `to_plain`), with the key ``ds_version`` added
        unless it has one."""
        plain: dict[str, Any] = to_plain({"ds_version": VERSION, **given})
        return plain

    def files_beside(self, state: TrainingState, client_state: dict[str, Any]) -> Mapping[str, bytes]:
        """Return the small files that are written beside the checkpoint's tensors, name -> content: those of
        `state_files`; an empty dict in DeepSpeed's own format, whose files have these names. ``state``: of the engine
        that saves. ``client_state``: what `client_state` returned."""
        if state.config.checkpoint.format == "deepspeed":
            return {}
        return state_files(state, self._config, from_plain(client_state))
