"""Learning rate schedules."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "LRRangeTest": "zero_core.schedules:LRRangeTest",
    "OneCycle": "zero_core.schedules:OneCycle",
    "VALID_LR_SCHEDULES": "zero_core.schedules.build:VALID_LR_SCHEDULES",
    "WarmupCosineLR": "zero_core.schedules:WarmupCosineLR",
    "WarmupDecayLR": "zero_core.schedules:WarmupDecayLR",
    "WarmupLR": "zero_core.schedules:WarmupLR",
}
__getattr__, __dir__ = names(__name__, _FOUND)
