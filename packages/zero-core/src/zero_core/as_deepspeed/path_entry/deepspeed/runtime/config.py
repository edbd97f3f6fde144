"""The configuration."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "DeepSpeedConfig": "zero_core.as_deepspeed.configuration:DeepSpeedConfig",
    "DeepSpeedConfigError": "zero_core.config:ConfigError",
}
__getattr__, __dir__ = names(__name__, _FOUND)
