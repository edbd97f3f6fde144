"""The logger."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "log_dist": "zero_core.as_deepspeed.logging_names:log_dist",
    "log_dist_once": "zero_core.as_deepspeed.logging_names:log_dist_once",
    "logger": "zero_core.as_deepspeed.logging_names:logger",
    "set_log_level_from_string": "zero_core.as_deepspeed.logging_names:set_log_level_from_string",
    "warning_once": "zero_core.as_deepspeed.logging_names:warning_once",
}
__getattr__, __dir__ = names(__name__, _FOUND)
