"""Dtypes of all that training keeps or sends, loss scales, and codecs of block quantisation.

Names are imported on first use, so that importing this package does not import torch; `loss_scale.py` and `names.py` do
without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_precision.blocks import BlockFormat, BlockQuantizer, TorchBlockQuantizer
    from zero_precision.codec import BlockCodec
    from zero_precision.device_blocks import DeviceBlockQuantizer
    from zero_precision.dtypes import dtype_name, parse_dtype
    from zero_precision.loss_scale import DynamicLossScale, LossScale, LossScaleError, NoLossScale, StaticLossScale
    from zero_precision.modules import (
        AUTOCAST_MODULES,
        autocast_dtypes,
        cast_floating,
        declared_keep_fp32,
        keep_fp32,
        kept_in_fp32,
    )
    from zero_precision.names import PrecisionError, short_dtype_name
    from zero_precision.policy import KeepPattern, PolicyRow, PrecisionPolicy
    from zero_precision.sign import SignCodec

_LAZY = {
    "AUTOCAST_MODULES": "modules",
    "BlockCodec": "codec",
    "BlockFormat": "blocks",
    "BlockQuantizer": "blocks",
    "DeviceBlockQuantizer": "device_blocks",
    "DynamicLossScale": "loss_scale",
    "KeepPattern": "policy",
    "LossScale": "loss_scale",
    "LossScaleError": "loss_scale",
    "NoLossScale": "loss_scale",
    "PolicyRow": "policy",
    "PrecisionError": "names",
    "PrecisionPolicy": "policy",
    "SignCodec": "sign",
    "StaticLossScale": "loss_scale",
    "TorchBlockQuantizer": "blocks",
    "autocast_dtypes": "modules",
    "cast_floating": "modules",
    "declared_keep_fp32": "modules",
    "dtype_name": "dtypes",
    "keep_fp32": "modules",
    "kept_in_fp32": "modules",
    "parse_dtype": "dtypes",
    "short_dtype_name": "names",
}

__all__ = [
    "AUTOCAST_MODULES",
    "BlockCodec",
    "BlockFormat",
    "BlockQuantizer",
    "DeviceBlockQuantizer",
    "DynamicLossScale",
    "KeepPattern",
    "LossScale",
    "LossScaleError",
    "NoLossScale",
    "PolicyRow",
    "PrecisionError",
    "PrecisionPolicy",
    "SignCodec",
    "StaticLossScale",
    "TorchBlockQuantizer",
    "autocast_dtypes",
    "cast_floating",
    "declared_keep_fp32",
    "dtype_name",
    "keep_fp32",
    "kept_in_fp32",
    "parse_dtype",
    "short_dtype_name",
]


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it, which is imported now. Raises AttributeError for any other
    name."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return __all__
