"""Dtypes of all that training keeps or sends, loss scales, and codecs of block quantisation."""

from zero_precision.blocks import BlockFormat, BlockQuantizer, TorchBlockQuantizer
from zero_precision.codec import BlockCodec
from zero_precision.device_blocks import DeviceBlockQuantizer
from zero_precision.dtypes import PrecisionError, dtype_name, parse_dtype
from zero_precision.loss_scale import DynamicLossScale, LossScale, LossScaleError, NoLossScale, StaticLossScale
from zero_precision.modules import (
    AUTOCAST_MODULES,
    autocast_dtypes,
    cast_floating,
    declared_keep_fp32,
    keep_fp32,
    kept_in_fp32,
)
from zero_precision.policy import KeepPattern, PolicyRow, PrecisionPolicy
from zero_precision.sign import SignCodec

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
]
