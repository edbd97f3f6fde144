"""The dtype policy, loss scale and autocast settings that a configuration asks for."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from zero_precision import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from zero_settings.errors import ConfigError, Problem, show

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zero_precision import PrecisionPolicy
    from zero_settings.keys import ConfigFile


def precision_policy(config: ConfigFile) -> PrecisionPolicy:
    """Return the dtypes that fp16, bf16, data_types and communication_data_type ask for.

    fp16 and bf16 keep float32 masters, states and accumulation unless `*_master_weights_and_grads` says otherwise;
    without them all is float32, or float64 with `data_types.param_dtype: "fp64"`. Where no key names a dtype, a float64
    parameter of the model stays float64 (`PartitionOptions.keeps_float64`). A `Config` is checked already; for a
    `ConfigFile` raises `PrecisionError` for dtypes that do not fit together.
    """
    return build_policy(config)


def build_policy(config: ConfigFile) -> PrecisionPolicy:
    """Return what `precision_policy` returns, for a configuration whose dtypes may not be checked yet. Raises
    `PrecisionError` for dtypes that do not fit together."""
    import torch

    from zero_precision import PrecisionPolicy, parse_dtype

    types = config.data_types
    overrides: dict[str, Any] = {}
    if types.grad_accum_dtype is not None:
        overrides["accumulate_dtype"] = parse_dtype(types.grad_accum_dtype)
    if types.buffer_dtype is not None:
        overrides["buffer_dtype"] = parse_dtype(types.buffer_dtype)
    if types.keep_in_fp32_modules != "auto":
        overrides.update(keep_fp32=types.keep_in_fp32_modules, keep_declared_fp32=False)
    if config.communication_data_type is not None:
        overrides["wire_dtype"] = parse_dtype(config.communication_data_type)
    if config.fp16.enabled:
        return PrecisionPolicy.fp16(
            **_masterless_fields(torch.float16, config.fp16.fp16_master_weights_and_grads), **overrides
        )
    if config.bf16.enabled:
        fields = _masterless_fields(torch.bfloat16, config.bf16.bf16_master_weights_and_grads)
        if config.bf16.bf16_optimizer_states:
            fields["state_dtype"] = torch.bfloat16
        return PrecisionPolicy.bf16(**{**fields, **overrides})
    return PrecisionPolicy.full(parse_dtype(types.param_dtype or "fp32"), **overrides)


def input_dtype(config: ConfigFile) -> torch.dtype | None:
    """Return the dtype that floating inputs of the model are cast to, because `auto_cast` of fp16 or bf16 asks for it;
    None where inputs stay as they are."""
    import torch

    if config.fp16.enabled and config.fp16.auto_cast:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled and config.bf16.auto_cast else None


def changes_default_dtypes(config: ConfigFile) -> bool:
    """Return whether a key changes dtypes beyond switching fp16 or bf16 on: any key of data_types,
    communication_data_type, or one for 16-bit masters or states. If none does, the dtypes of `build_policy` fit
    together, and torch need not be imported to find out."""
    return (
        config.data_types != type(config.data_types)()
        or config.communication_data_type is not None
        or config.fp16.fp16_master_weights_and_grads
        or config.bf16.bf16_master_weights_and_grads
        or config.bf16.bf16_optimizer_states
    )


def _masterless_fields(half: torch.dtype, enabled: bool) -> dict[str, Any]:
    """Return the fields of a `PrecisionPolicy` without float32 masters that accumulates gradients in ``half``; an empty
    dict unless ``enabled``."""
    return {"master_dtype": None, "accumulate_dtype": half} if enabled else {}


def loss_scale(config: ConfigFile) -> LossScale:
    """Return a new loss scale. For float16, under torch_autocast too, it is as the fp16 section says, dynamic unless
    `fp16.loss_scale` is a constant; for other dtypes it is `NoLossScale`.

    Raises `PrecisionError` for settings that do not fit together."""
    fp16 = config.fp16
    if not (fp16.enabled or (config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16")):
        return NoLossScale()
    if fp16.loss_scale > 0:
        return StaticLossScale(fp16.loss_scale)
    return DynamicLossScale(
        initial_scale_power=fp16.initial_scale_power,
        loss_scale_window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_loss_scale=fp16.min_loss_scale,
    )


def autocast_modules(config: ConfigFile) -> tuple[type[nn.Module], ...] | None:
    """Return the module classes that `torch_autocast.lower_precision_safe_modules` names, after importing the modules
    they are in; None if the key is not given.

    Raises `ConfigError` for a name that is not a module class."""
    names = config.torch_autocast.lower_precision_safe_modules
    return None if names is None else tuple(_module_class(index, name) for index, name in enumerate(names))


def _module_class(index: int, name: str) -> type[nn.Module]:
    """Return the `nn.Module` class whose full name is ``name``, after importing its module.

    ``index``: the name's position in `lower_precision_safe_modules`, for the `ConfigError` that is raised if it is no
    module class."""
    from torch import nn

    path = f"torch_autocast.lower_precision_safe_modules[{index}]"
    expected, action = "expected the full name of a module class", 'for example "torch.nn.Linear"'
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(Problem(path, expected, f"{show(name)}, {error}", action=action)) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(Problem(path, expected, show(name), action=action))
    return found
