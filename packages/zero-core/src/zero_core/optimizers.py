"""Build the optimizer that the configuration names. In private functions ``arguments`` are its parameters in the
configuration, from which keys are removed, and ``half_states`` asks for moments in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_core.errors import UsageError
from zero_optim import Lamb, Lion, MuonWithAdam, OneBitAdam, OneBitLamb, ZeroOneAdam
from zero_optim_kernels.torch import CPUAdagrad, CPUAdam, CPUAdamW, CPULion

if TYPE_CHECKING:
    from zero_settings import Config

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
_WITHOUT_VARIANTS: dict[str, Callable[..., Optimizer]] = {
    "lamb": Lamb,
    "onebitadam": OneBitAdam,
    "onebitlamb": OneBitLamb,
    "zerooneadam": ZeroOneAdam,
}
_ADAM_ONLY_TORCH = frozenset(["amsgrad", "foreach", "fused", "capturable", "differentiable"])


def build_optimizer(
    given: Optimizer | Callable[[Any], Optimizer] | None,
    config: Config,
    model: nn.Module,
    parameters: Parameters | None,
    device: torch.device,
) -> Optimizer | None:
    """Return the user's optimizer, the one that the user's function makes, or the one that the configuration names;
    None if there is none of them. ``parameters``: the parameters or param groups to train, by default all that require
    gradients. ``device``: where the shards will be; on the CPU the names mean the optimizers of zero-optim-kernels,
    else torch's. Raises `UsageError` for another ``given``, nothing to train, and unavailable arguments."""
    if isinstance(given, Optimizer):
        return given
    if given is not None and not callable(given):
        raise UsageError(
            f"optimizer: expected a torch.optim.Optimizer, or a function that makes one of parameters, got "
            f"{type(given).__name__}. Where it wraps one, give that, and add to its step by register_step_post_hook."
        )
    chosen: Any = list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    if given is not None:
        made = given(chosen)
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"optimizer: the function given must return a torch.optim.Optimizer, got {type(made).__name__}"
            )
        return made
    if config.optimizer is None:
        return None
    if not chosen:
        raise UsageError("optimizer: there is nothing to train: no parameter of the model requires gradients")
    name, arguments = config.optimizer.type, config.optimizer.params.kwargs()
    on_cpu = device.type == "cpu" or config.zero_optimization.offload_optimizer.device != "none"
    if name == "muon":
        return _muon(model, chosen, arguments)
    if name in ("adam", "adamw"):
        return _adam(chosen, arguments, decoupled=config.optimizer.decoupled_weight_decay, on_cpu=on_cpu)
    if name == "adagrad":
        return _adagrad(chosen, arguments, on_cpu=on_cpu)
    if name == "lion":
        half_states = not arguments.pop("fp32_optimizer_states", True)
        if on_cpu:
            return _over_stand_ins(CPULion, chosen, {**arguments, **_state_dtype(half_states)})
        _refuse_half_states(half_states, "Lion")
        return Lion(chosen, **arguments)
    if name in _WITHOUT_VARIANTS:
        return _without_variants(name, chosen, arguments)
    by_name: Optimizer = getattr(torch.optim, name)(chosen, **arguments)
    return by_name


def _muon(model: nn.Module, parameters: Any, arguments: dict[str, Any]) -> Optimizer:
    """Return Muon for matrices, with AdamW for other ``parameters``. Raises `UsageError` for matrices before torch
    2.9."""
    try:
        return MuonWithAdam.from_model(model, parameters, arguments)
    except ImportError as error:  # from torch before 2.9
        raise UsageError(f"optimizer.type: {error}") from error


def _adam(parameters: Any, arguments: dict[str, Any], *, decoupled: bool, on_cpu: bool) -> Optimizer:
    """Return Adam, or AdamW if ``decoupled``. It is the CPU kernel's if ``on_cpu``, unless an argument asks for
    torch's; else torch's. Raises `UsageError` for arguments that are not available."""
    wants_torch = arguments.pop("torch_adam")
    arguments.pop("adam_w_mode")
    half_states = not arguments.pop("fp32_optimizer_states")
    if not arguments.pop("bias_correction"):
        raise UsageError("optimizer.params.bias_correction: false is not available for Adam; remove it")
    if on_cpu and not wants_torch and not any(arguments.get(key) for key in _ADAM_ONLY_TORCH):
        kept = {key: value for key, value in arguments.items() if key not in _ADAM_ONLY_TORCH}
        return _over_stand_ins(CPUAdamW if decoupled else CPUAdam, parameters, {**kept, **_state_dtype(half_states)})
    _refuse_half_states(half_states, "Adam")
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(parameters, **{"fused": not arguments.get("foreach", False), **arguments})


def _adagrad(parameters: Any, arguments: dict[str, Any], *, on_cpu: bool) -> Optimizer:
    """Return Adagrad: the CPU kernel's if ``on_cpu``, unless an argument asks for torch's; else torch's. Raises
    `UsageError` for arguments that are not available."""
    half_states = not arguments.pop("fp32_optimizer_states")
    if arguments.pop("amsgrad"):
        raise UsageError("optimizer.params.amsgrad: Adagrad has no such variant; remove it")
    if on_cpu and not any(arguments.get(key) for key in _ADAM_ONLY_TORCH):
        kept = {key: value for key, value in arguments.items() if key not in _ADAM_ONLY_TORCH}
        return _over_stand_ins(CPUAdagrad, parameters, {**kept, **_state_dtype(half_states)})
    _refuse_half_states(half_states, "Adagrad")
    return torch.optim.Adagrad(parameters, **arguments)


def _without_variants(name: str, parameters: Any, arguments: dict[str, Any]) -> Optimizer:
    """Return LAMB or the 1-bit optimizer ``name``. Raises `UsageError` for arguments that it does not have."""
    for key in ("eps_inside_sqrt", "amsgrad"):
        if arguments.pop(key):
            raise UsageError(f"optimizer.params.{key}: not available for {name}; set it to false")
    if arguments.pop("max_grad_norm", 0):
        raise UsageError('optimizer.params.max_grad_norm: set it to 0 and use "gradient_clipping"')
    for key in ("cuda_aware", "comm_backend_name"):
        arguments.pop(key, None)
    return _WITHOUT_VARIANTS[name](parameters, **arguments)


def _state_dtype(half_states: bool) -> dict[str, Any]:
    """Return the keyword argument for moments in bfloat16 of a CPU optimizer; an empty dict unless ``half_states``."""
    return {"state_dtype": "bfloat16"} if half_states else {}


def _refuse_half_states(half_states: bool, name: str) -> None:
    """Raise `UsageError` if ``half_states``, which the optimizer called ``name`` does not have on this device."""
    if half_states:
        raise UsageError(f"optimizer.params.fp32_optimizer_states: false is for {name} on the CPU; set it to true")


def _over_stand_ins(kind: Callable[..., Optimizer], parameters: Any, arguments: dict[str, Any]) -> Optimizer:
    """Return an optimizer of the class ``kind``, of zero-optim-kernels, over ``parameters``. It is constructed over
    empty float32 tensors, as its checks apply to the fragments it will get, not to released or 16-bit parameters."""
    groups = parameters if any(isinstance(p, dict) for p in parameters) else [{"params": parameters}]
    listed = [list(group["params"]) for group in groups]
    stand_ins = [
        {**group, "params": [_stand_in(p) for p in params]} for group, params in zip(groups, listed, strict=True)
    ]
    made = kind(stand_ins, **arguments)
    for group, params in zip(made.param_groups, listed, strict=True):
        group["params"] = [p[1] if isinstance(p, tuple) else p for p in params]
    return made


def _stand_in(parameter: Any) -> Any:
    """Return an empty float32 parameter; if ``parameter`` is a (name, parameter) pair, a pair of its name and that."""
    empty = nn.Parameter(torch.empty(0))
    return (parameter[0], empty) if isinstance(parameter, tuple) else empty
