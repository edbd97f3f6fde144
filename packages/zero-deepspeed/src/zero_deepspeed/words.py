"""Values of the configuration as enumerations, which scripts may pass instead of strings."""

from __future__ import annotations

import enum


class OffloadDeviceEnum(str, enum.Enum):
    """The tiers of offloaded shards."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """The states that `engine.offload_states` can move to the host."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(enum.IntEnum):
    """The ZeRO stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
