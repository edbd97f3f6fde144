"""What only some conversions need."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import CheckpointError


def require_torch(what: str) -> None:
    """Raise CheckpointError saying what to do when `what` (files of torch) cannot be done for want of torch."""
    if find_spec("torch") is None:
        raise CheckpointError(
            f"{what} needs torch: pip install zero-ckpt[torch]; without it checkpoints of zero-ckpt and safetensors "
            "are read, and safetensors written (zero_to_fp32.py: --safe_serialization)"
        )
