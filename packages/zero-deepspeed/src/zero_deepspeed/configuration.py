"""`deepspeed.DeepSpeedConfig` and `DeepSpeedZeroConfig`: a configuration and its section for ZeRO, resolved."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from zero_settings import Config, LeafModule, OffloadOptimizer, OffloadParam, ZeroOptimization

from .monitor import MonitorConfig, get_monitor_config
from .settings import load_config, raw_config


class DeepSpeedZeroConfig:
    """The section `zero_optimization`, resolved as `initialize` does, by DeepSpeed's names for its values.

    ``values``: keys of the section as a JSON file has them, or their other names (``prefetch_bucket_size`` for
    ``stage3_prefetch_bucket_size``); both are attributes. ``offload_param`` and ``offload_optimizer`` are None
    unless they are given; ``leaf_module`` has lists. Raises `ConfigError`.
    """

    def __init__(self, **values: Any) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        whole = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": values}
        self._section: ZeroOptimization = load_config(whole, ranks).zero_optimization
        self._given = frozenset(key for key, value in values.items() if value is not None)

    def model_dump(self) -> dict[str, Any]:
        """Return every value of the section as plain data, by its key."""
        return self._section.model_dump()

    def __getattr__(self, name: str) -> Any:
        """Return the section's value of the key ``name``, or of the key that has ``name`` as its other name; None for a
        section of offload that is not given. Raises AttributeError for an unknown name.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._section, self._section.aliases.get(name, name))
        if isinstance(value, LeafModule):
            return value.model_copy(update={kind: list(found) for kind, found in value})
        offload = isinstance(value, (OffloadOptimizer, OffloadParam))
        return None if offload and value.device == "none" and name not in self._given else value


class DeepSpeedConfig:
    """A configuration, resolved as `initialize` does; its values are attributes, as in `zero_core.Config`.

    ``config``: a dict, the path of a JSON file, or urlsafe base64 of JSON text. ``mpu`` and ``mesh_device`` have no
    effect: batch sizes are for all ranks, by torch.distributed or else WORLD_SIZE. Raises `ConfigError`.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = raw_config(config)
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        self._resolved: Config = load_config(self._param_dict, ranks)

    @property
    def monitor_config(self) -> MonitorConfig:
        """Return the sections that say where metrics go."""
        return get_monitor_config(self._param_dict)

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
        """Return the attribute ``name`` of the resolved configuration. Raises AttributeError for an unknown one."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._resolved, name)
