"""`deepspeed.DeepSpeedConfig`: a configuration, resolved."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from zero_settings import Config

from .settings import load_config, raw_config


class DeepSpeedConfig:
    """A configuration, resolved as `initialize` does; its values are attributes, as in `zero_core.Config`.

    ``config``: as for `initialize`. ``mpu`` and ``mesh_device`` have no effect: batch sizes are for all ranks, by
    torch.distributed or else WORLD_SIZE. Raises `ConfigError`.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = raw_config(config)
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        self._resolved: Config = load_config(self._param_dict, ranks)

    @property
    def zero_config(self) -> Any:
        """Return the section zero_optimization."""
        return self._resolved.zero_optimization

    @property
    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self._resolved.zero_optimization.stage

    @property
    def zero_enabled(self) -> bool:
        """Return whether anything is sharded."""
        return self._resolved.zero_optimization.stage > 0

    def __getattr__(self, name: str) -> Any:
        """Return the value of that name of the resolved configuration."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._resolved, name)
