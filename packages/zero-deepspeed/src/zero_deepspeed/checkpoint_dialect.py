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
    """The additions to a checkpoint for scripts of DeepSpeed, as a `zero_core.checkpoint.Dialect`.

    ``config``: the configuration as the user gave it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def writer(self, state: TrainingState) -> Callable[..., Path]:
        """Return the function that writes the format that the configuration names. Raises `UsageError` for what that
        cannot hold."""
        return save_sharded if state.config.checkpoint.format == "native" else DeepSpeedWriter(state, self._config)

    def client_state(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``given``, the user's client state, with the current ``ds_version`` unless it has one, as plain
        data."""
        plain: dict[str, Any] = to_plain({"ds_version": VERSION, **given})
        return plain

    def files_beside(self, state: TrainingState, client_state: dict[str, Any]) -> Mapping[str, bytes]:
        """Return name -> content of the files of `state_files`; ``client_state`` is what
        the method of that name returned. None in DeepSpeed's format, whose files have these names."""
        if state.config.checkpoint.format == "deepspeed":
            return {}
        return state_files(state, self._config, from_plain(client_state))
