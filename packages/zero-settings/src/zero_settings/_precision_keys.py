"""Keys of dtypes: fp16, bf16, autocast and data types."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from zero_precision import PrecisionError, short_dtype_name
from zero_settings._base import ALL_KEYS, Flag, NaturalFloat, NaturalInt, PositiveInt, Section, Text


def _short_dtype_name(value: object) -> object:
    """Return the short name of a dtype called by any of its names, such as "bf16" for "bfloat16". Any other value is
    returned as it is, for pydantic to refuse."""
    try:
        return short_dtype_name(value) if isinstance(value, str) else value
    except PrecisionError:
        return value


def _half_dtype_name(value: object) -> object:
    """Return "fp16" or "bf16" for any name of these dtypes, such as "bfloat16".

    A pydantic validator: raises PydanticCustomError for anything else.
    """
    name = _short_dtype_name(value)
    if name not in ("fp16", "bf16"):
        raise PydanticCustomError("dtype", "'bfloat16' or 'float16'")
    return name


DtypeName = Annotated[Literal["fp16", "bf16", "fp32", "fp64"], BeforeValidator(_short_dtype_name)]
NarrowDtypeName = Annotated[Literal["fp16", "bf16"], BeforeValidator(_half_dtype_name)]


class Fp16(Section):
    """Options of training in float16: parameters in float16, and a loss scale."""

    auto_keys = ALL_KEYS

    enabled: Flag = Field(default=False, description="Train in float16.")
    auto_cast: Flag = Field(default=False, description="Cast the floating inputs of the model to float16.")
    loss_scale: NaturalFloat = Field(
        default=0.0, description="0 is the dynamic loss scale, any other number a constant one."
    )
    initial_scale_power: NaturalInt = Field(
        default=16, le=127, description="The dynamic scale starts at 2 to this power."
    )
    loss_scale_window: PositiveInt = Field(default=1000, description="Steps without overflow that double the scale.")
    hysteresis: PositiveInt = Field(default=2, description="Overflows before the scale is halved.")
    consecutive_hysteresis: Flag = Field(default=False, description="The count restarts after each step without one.")
    min_loss_scale: PositiveInt = Field(
        default=1, description="The scale falls no lower; there, an overflow is an error."
    )
    fp16_master_weights_and_grads: Flag = Field(
        default=False, description="No float32 master copy (stage 1 and above)."
    )


class Bf16(Section):
    """Options of training in bfloat16: parameters in bfloat16, and float32 accumulation, masters and states unless keys
    say otherwise.
    """

    auto_keys = ALL_KEYS

    enabled: Flag = Field(default=False, description="Train in bfloat16.")
    auto_cast: Flag = Field(default=False, description="Cast the floating inputs of the model to bfloat16.")
    immediate_grad_update: Flag = False
    check_grad_overflow: Flag | None = Field(
        default=None, description="true: skip a step whose gradient is not finite; otherwise it is an error."
    )
    bf16_master_weights_and_grads: Flag = Field(
        default=False, description="No float32 master copy (stage 1 and above)."
    )
    bf16_optimizer_states: Flag = Field(default=False, description="Optimizer states in bfloat16 too.")


class TorchAutocast(Section):
    """Options of training under torch.autocast: parameters stay float32, and torch casts per operation."""

    auto_keys = ALL_KEYS

    enabled: Flag = Field(default=False, description="Run the model under torch.autocast.")
    dtype: NarrowDtypeName | None = Field(default=None, description="bfloat16 unless given.")
    lower_precision_safe_modules: tuple[Text, ...] | None = Field(
        default=None, description="Full names of module classes whose weights are gathered in the autocast dtype."
    )


class DataTypes(Section):
    """Dtypes of parameters, gradients and buffers, where they are to differ from what fp16 or bf16 implies."""

    auto_keys: ClassVar[frozenset[str]] = frozenset({"grad_accum_dtype", "param_dtype", "buffer_dtype"})

    grad_accum_dtype: DtypeName | None = Field(default=None, description="The reduced gradient and its accumulation.")
    param_dtype: DtypeName | None = Field(
        default=None,
        description="fp64 or fp32 without fp16 / bf16; else the same as they. Null there: fp32, and float64 stays.",
    )
    buffer_dtype: DtypeName | None = Field(default=None, description="Floating buffers; null leaves them as they are.")
    keep_in_fp32_modules: Literal["auto"] | tuple[Text, ...] = Field(
        default="auto", description='Name patterns; "auto" takes the lists that the model declares for itself.'
    )
