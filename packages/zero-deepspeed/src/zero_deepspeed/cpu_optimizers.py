"""`deepspeed.ops`: CPU optimizers with DeepSpeed's arguments, over the kernels of zero-optim-kernels.

They are constructed before `initialize`, over parameters of the model that may be released or in half precision; the
engine's steps run on fragments in the optimizer's precision. ``model_params`` is an iterable of parameters or of param
groups; param groups of another optimizer stay the same dict objects, and keep that optimizer's options. Stepped without
an engine, the optimizers also take float16 parameters, which are updated in float32 and rounded, and sparse gradients,
which count as dense ones with zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_core.errors import UsageError
from zero_optim import Lion
from zero_optim_kernels.torch import CPUAdagrad, CPUAdam, CPULion

Parameters = Any
logger = logging.getLogger("DeepSpeed")
_NOT_OF_ADAM = frozenset(
    ["alpha", "beta2_decay", "centered", "decay_rate", "etas", "lambd", "lr_decay", "momentum", "momentum_decay", "rho"]
)


class DeepSpeedCPUAdam(CPUAdam):
    """AdamW, or Adam with ``adamw_mode=False``, by the CPU kernels; see this module about ``model_params``.

    ``fp32_optimizer_states``: false keeps states in bfloat16. Raises `UsageError` without bias correction, with
    ``amsgrad``, for an ``eps`` that is no number, and without parameters. The other arguments are those of
    `torch.optim.Adam`.
    """

    same_arithmetic_as = CPUAdam

    def __init__(
        self,
        model_params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not bias_correction:
            raise UsageError("DeepSpeedCPUAdam(bias_correction=False) is not available; leave it true")
        if amsgrad:
            raise UsageError("DeepSpeedCPUAdam(amsgrad=True) is not available; leave it false")
        model_params = list(model_params)
        _check_replaced([eps, *(group["eps"] for group in model_params if isinstance(group, dict) and "eps" in group)])
        _warn_of_replaced(model_params)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        forced = {"decoupled_weight_decay": adamw_mode}
        _init_without_checks(self, CPUAdam, model_params, fp32_optimizer_states, {**options, **forced}, forced)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, and return the result of ``closure``, which is called first, with autograd on; None
        without one. See this module about float16 and sparse gradients."""
        return _step_any(self, super(CPUAdam, self).step, closure)


def _check_replaced(eps: Sequence[Any]) -> None:
    """Raise `UsageError` if one of the values ``eps`` is no number: an Adafactor's param groups have a pair, and a
    framework that replaces an Adafactor by DeepSpeedCPUAdam hands it on."""
    for given in eps:
        if not isinstance(given, Real):
            raise UsageError(
                f"DeepSpeedCPUAdam(eps={given!r}): expected a number. Adafactor has two: a framework that replaces it "
                "by this optimizer hands them on. Use AdamW, or train Adafactor itself: set "
                'zero_force_ds_cpu_optimizer to false and offload_optimizer.device to "none"'
            )


def _warn_of_replaced(model_params: Sequence[Any]) -> None:
    """Log one warning if ``model_params`` are param groups with options that Adam does not have: then a framework, such
    as Accelerate, replaces another optimizer by DeepSpeedCPUAdam."""
    foreign = sorted({key for group in model_params if isinstance(group, dict) for key in group.keys() & _NOT_OF_ADAM})
    if foreign:
        logger.warning(
            "DeepSpeedCPUAdam: the param groups have options of another optimizer (%s), which is replaced by Adam, as "
            "Accelerate does with offload_optimizer; to train the other one, set zero_force_ds_cpu_optimizer to false",
            ", ".join(foreign),
        )


class DeepSpeedCPUAdagrad(CPUAdagrad):
    """Adagrad by the CPU kernels; see this module about ``model_params``.

    ``fp32_optimizer_states``: false keeps states in bfloat16. Raises `UsageError` with ``amsgrad``, and without
    parameters. The other arguments are those of `torch.optim.Adagrad`.
    """

    same_arithmetic_as = CPUAdagrad

    def __init__(
        self,
        model_params: Parameters,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise UsageError("DeepSpeedCPUAdagrad(amsgrad=True): Adagrad has no such variant; leave it false")

        options = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        _init_without_checks(self, CPUAdagrad, model_params, fp32_optimizer_states, options)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, and return the result of ``closure``, which is called first, with autograd on; None
        without one. See this module about float16 and sparse gradients."""
        return _step_any(self, super(CPUAdagrad, self).step, closure)


class DeepSpeedCPULion(CPULion):
    """Lion by the CPU kernels; see this module about ``model_params``.

    ``fp32_optimizer_states``: false keeps states in bfloat16. Raises `UsageError` without parameters. The other
    arguments are those of `CPULion`.
    """

    same_arithmetic_as = CPULion

    def __init__(
        self,
        model_params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        _init_without_checks(self, CPULion, model_params, fp32_optimizer_states, options)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, and return the result of ``closure``, which is called first, with autograd on; None
        without one. See this module about float16 and sparse gradients."""
        return _step_any(self, super(CPULion, self).step, closure)


class FusedAdam(torch.optim.AdamW):
    """torch's fused AdamW, or Adam with ``adam_w_mode=False``. ``set_grad_none`` has no effect. Raises `UsageError`
    without bias correction. The other arguments are those of `torch.optim.Adam`."""

    elementwise = True

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise UsageError("FusedAdam(bias_correction=False) is not available; leave it true")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, fused=True)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adam_w_mode


class FusedLion(Lion):
    """Lion with torch's foreach operations. ``set_grad_none`` has no effect. ``params``, ``lr``, ``betas`` and
    ``weight_decay`` are those of `CPULion`.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


def _init_without_checks(
    optimizer: Optimizer,
    kind: type[CPUAdam | CPUAdagrad | CPULion],
    parameters: Parameters,
    fp32_states: bool,
    options: Mapping[str, Any],
    forced: Mapping[str, Any] | None = None,
) -> None:
    """Initialise ``optimizer`` by the constructor of its base ``kind``, without that constructor's checks of the
    parameters, which are not those that the kernels will update.

    ``parameters``: an iterable of parameters, or of param groups, which are changed in place: they get those of
    ``options`` that they lack, and all of ``forced`` (None: none). ``fp32_states``: false for states in bfloat16.
    Raises `UsageError` without parameters.
    """
    given = list(parameters)
    if not given:
        raise UsageError(f"{type(optimizer).__name__}: there are no parameters to optimise")
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    stand_ins = [nn.Parameter(torch.empty(0))]
    kind.__init__(optimizer, stand_ins, state_dtype="float32" if fp32_states else "bfloat16", **options)  # type: ignore[arg-type]
    optimizer.param_groups.clear()
    optimizer.state.clear()
    for group in groups:
        params = group["params"]
        group["params"] = [params] if isinstance(params, nn.Parameter) else list(params)
        for key, value in optimizer.defaults.items():
            group.setdefault(key, value)
        group.update(forced or {})
        optimizer.param_groups.append(group)


def _step_any(
    optimizer: Optimizer, kernel_step: Callable[[], float | None], closure: Callable[[], float] | None
) -> float | None:
    """Run ``closure``, if given, with autograd on, then ``kernel_step``; return the closure's result, None without one.

    During ``kernel_step`` float16 parameters and sparse gradients are replaced by some that the kernels can read.
    ``kernel_step``: the base class's method, which does not run torch's step hooks: the caller's ``step`` has run them.
    Raises as the kernels' optimizers do.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    with torch.no_grad(), _stand_ins(optimizer):
        kernel_step()
    return loss


@contextmanager
def _stand_ins(optimizer: Optimizer) -> Iterator[None]:
    """Context manager: in the optimizer's groups and states, replace each float16 parameter by a float32 copy, and each
    parameter with a sparse gradient by one with a dense gradient. At the end the parameters are back in their places,
    with the values of their replacements, also if the step failed.
    """
    replaced: list[tuple[list[Any], int, Any, nn.Parameter]] = []
    for group in optimizer.param_groups:
        params = group["params"]
        for index, parameter in enumerate(params):
            gradient = parameter.grad
            if gradient is None or not (parameter.dtype == torch.float16 or gradient.is_sparse):
                continue
            wide = torch.float32 if parameter.dtype == torch.float16 else parameter.dtype
            stand_in = nn.Parameter(parameter.detach().to(wide))
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            stand_in.grad = dense.to(wide)
            replaced.append((params, index, parameter, stand_in))
            params[index] = stand_in
            _move_state(optimizer, parameter, stand_in)
    try:
        yield
    finally:
        for params, index, parameter, stand_in in replaced:
            params[index] = parameter
            _move_state(optimizer, stand_in, parameter)
            parameter.copy_(stand_in)


def _move_state(optimizer: Optimizer, source: torch.Tensor, target: torch.Tensor) -> None:
    """Move the optimizer's state of the parameter ``source``, if it has one, to the parameter ``target``."""
    if source in optimizer.state:
        optimizer.state[target] = optimizer.state.pop(source)
