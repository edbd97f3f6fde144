"""Checkpoints."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "utils": "deepspeed.checkpoint.utils",
}
_REFUSED = {
    "DeepSpeedCheckpoint": "use zero_ckpt.open_checkpoint, or zero-ckpt inspect",
}
__getattr__, __dir__ = names(__name__, _FOUND, _REFUSED)
