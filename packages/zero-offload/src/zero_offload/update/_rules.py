"""The optimizers that an update knows: the states that each keeps for a parameter, and the fused kernel, or the step of
torch's optimizer, that updates the parameter. A batch is the operands of one kernel call, `KernelOperands`: the
addresses of weights, gradients and states of several spans (consecutive elements of fragments).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from zero_optim_kernels import adagrad_step, adam_step, lion_step, sgd_step
from zero_optim_kernels.torch import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW, CPULion

from ._probed_states import ProbedStates, copy_of, probe_states

__all__ = ["KernelOperands", "OptimizerLike", "Rule", "find_rule", "has_rule"]

OptimizerLike = str | type[torch.optim.Optimizer] | torch.optim.Optimizer
"""A name ("AdamW"), a class, or an optimizer, of which a copy steps where its class has no kernel."""

Group = Mapping[str, Any]


@dataclass
class KernelOperands:
    """The operands of one kernel call: one entry per span in every list, all of the same group and dtypes.

    ``sizes`` in elements; ``params``, ``grads`` and ``states`` (by kind of state) are memory addresses; ``common`` are
    keyword arguments of the kernel; ``first``: the fragments have no moments yet. ``results``: addresses for the new
    values, of ``param`` and by kind of state; None for those of the operands themselves.
    """

    sizes: list[int]
    params: list[int]
    grads: list[int]
    states: dict[str, list[int]]
    common: dict[str, Any]
    first: bool
    results: dict[str, list[int]] | None = None


def _no_numbers(group: Group) -> Mapping[str, Any]:
    """Return an empty mapping, whatever ``group`` is: optimizers with a kernel keep no numbers of a parameter beside
    ``step``.
    """
    return {}


def _float_count(group: Group) -> Any:
    """Return an example of the ``step`` that torch's own optimizers keep, a 0-D float32 tensor."""
    return torch.zeros((), dtype=torch.float32)


@dataclass(frozen=True)
class Rule:
    """How one optimizer updates, and what it keeps for a parameter.

    ``template`` is the torch class whose options and defaults it takes. ``moments`` returns (name, whether it is a
    second moment, never negative) of each moment for a parameter group, ``initial`` the value that moments start with.
    ``run`` calls the kernel, which writes weights and states in place, or into the batch's ``results``; None: there is
    no kernel, and the optimizer that ``make`` returns steps, also on the host. ``refused``: options that the kernel
    does not have. ``fused``: on a device, where no option says otherwise, the template steps by torch's fused kernel;
    torch's own classes choose by themselves. ``numbers`` returns what the optimizer keeps of a parameter of a group
    beside moments and ``step``, by name, as examples of their types; ``count`` an example of ``step``, None if it keeps
    none.
    """

    template: type[torch.optim.Optimizer]
    moments: Callable[[Group], tuple[tuple[str, bool], ...]]
    initial: Callable[[Group], float]
    run: Callable[[KernelOperands, Group], None] | None
    refused: tuple[str, ...] = ()
    fused: bool = False
    make: Callable[[], torch.optim.Optimizer] | None = None
    numbers: Callable[[Group], Mapping[str, Any]] = _no_numbers
    count: Callable[[Group], Any] = _float_count

    def defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of a parameter group: the given ``options``, and for the others the defaults of the torch
        class, which checks them and raises its own errors.
        """
        probe = torch.zeros(1, requires_grad=True)
        return dict(self.template([probe], **options).defaults)

    def check_group(self, group: Group) -> None:
        """Raise ValueError if a parameter group sets an option that the kernel does not have."""
        for option in self.refused:
            if group.get(option):
                raise ValueError(
                    f"{option}={group[option]!r} is not supported by the offloaded {self.template.__name__}; "
                    f"leave it out, or use {self.template.__name__} on the device"
                )


def _grad_sign(group: Group) -> float:
    """Return the factor of the gradients for a parameter group: -1 with ``maximize``, else 1."""
    return -1.0 if group.get("maximize") else 1.0


def _common_arguments(batch: KernelOperands, group: Group) -> dict[str, Any]:
    """Return the keyword arguments of a kernel call that all kernels take, with ``grad_scale`` negated if the group has
    ``maximize``.
    """
    return {**batch.common, "grad_scale": batch.common["grad_scale"] * _grad_sign(group), "out": batch.results}


def _run_adam(batch: KernelOperands, group: Group) -> None:
    """Update the weights and states of a batch by the kernel of Adam, or of AdamW if the parameter group has
    ``decoupled_weight_decay``.
    """
    adam_step(
        batch.params,
        batch.grads,
        batch.states["exp_avg"],
        batch.states["exp_avg_sq"],
        batch.sizes,
        lr=float(group["lr"]),
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        adamw_mode=group["decoupled_weight_decay"],
        exp_avg_scale=batch.states.get("exp_avg_scale"),
        exp_avg_sq_scale=batch.states.get("exp_avg_sq_scale"),
        **_common_arguments(batch, group),
    )


def _run_sgd(batch: KernelOperands, group: Group) -> None:
    """Update the weights and states of a batch by the kernel of SGD, with the options of the parameter group."""
    sgd_step(
        batch.params,
        batch.grads,
        batch.states.get("momentum_buffer"),
        batch.sizes,
        lr=float(group["lr"]),
        momentum=group["momentum"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        weight_decay=group["weight_decay"],
        first=batch.first,
        momentum_buffer_scale=batch.states.get("momentum_buffer_scale"),
        **_common_arguments(batch, group),
    )


def _run_adagrad(batch: KernelOperands, group: Group) -> None:
    """Update the weights and states of a batch by the kernel of Adagrad, with the options of the parameter group."""
    common = _common_arguments(batch, group)
    if batch.results is not None:
        common["out"] = {name.replace("sum", "sum_sq"): found for name, found in batch.results.items()}
    adagrad_step(
        batch.params,
        batch.grads,
        batch.states["sum"],
        batch.sizes,
        lr=float(group["lr"]),
        lr_decay=group["lr_decay"],
        sum_sq_scale=batch.states.get("sum_scale"),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        **common,
    )


def _run_lion(batch: KernelOperands, group: Group) -> None:
    """Update the weights and states of a batch by the kernel of Lion, with the options of the parameter group."""
    lion_step(
        batch.params,
        batch.grads,
        batch.states["exp_avg"],
        batch.sizes,
        lr=float(group["lr"]),
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        weight_decay=group["weight_decay"],
        exp_avg_scale=batch.states.get("exp_avg_scale"),
        **_common_arguments(batch, group),
    )


def _zero_initial(group: Group) -> float:
    """Return 0, the value that the moments of every parameter group start with."""
    return 0.0


_REFUSED = ("amsgrad", "differentiable")
_ADAM_MOMENTS = (("exp_avg", False), ("exp_avg_sq", True))
_ADAM = Rule(torch.optim.Adam, lambda group: _ADAM_MOMENTS, _zero_initial, _run_adam, _REFUSED)
_ADAMW = Rule(torch.optim.AdamW, lambda group: _ADAM_MOMENTS, _zero_initial, _run_adam, _REFUSED)
_FUSED_ADAM, _FUSED_ADAMW = replace(_ADAM, fused=True), replace(_ADAMW, fused=True)
_SGD = Rule(
    torch.optim.SGD,
    lambda group: (("momentum_buffer", False),) if group["momentum"] else (),
    _zero_initial,
    _run_sgd,
    _REFUSED,
)
_ADAGRAD = Rule(
    torch.optim.Adagrad,
    lambda group: (("sum", True),),
    lambda group: float(group["initial_accumulator_value"]),
    _run_adagrad,
    _REFUSED,
)
_LION = Rule(CPULion, lambda group: (("exp_avg", False),), _zero_initial, _run_lion)

_BY_NAME = {"adagrad": _ADAGRAD, "adam": _FUSED_ADAM, "adamw": _FUSED_ADAMW, "lion": _LION, "sgd": _SGD}
_BY_CLASS: Sequence[tuple[type, Rule]] = (
    (torch.optim.AdamW, _ADAMW),
    (torch.optim.Adam, _ADAM),
    (torch.optim.SGD, _SGD),
    (torch.optim.Adagrad, _ADAGRAD),
    (CPUAdamW, _FUSED_ADAMW),
    (CPUAdam, _FUSED_ADAM),
    (CPUSGD, _SGD),
    (CPUAdagrad, _ADAGRAD),
    (CPULion, _LION),
)


def has_rule(optimizer: OptimizerLike) -> bool:
    """Return whether there is a kernel for an optimizer: a name ("AdamW", any case), a class (a subclass counts as
    another class), or an object, if its groups set no option that the kernel lacks.

    A class that merely wraps another optimizer's arithmetic names that class in its attribute ``same_arithmetic_as``.
    """
    return _rule_with_kernel(optimizer) is not None


def _rule_with_kernel(optimizer: OptimizerLike) -> Rule | None:
    """Return the rule with a kernel for an optimizer (a name, a class or an object); None if there is none, also if an
    object sets an option that the kernel lacks.
    """
    if isinstance(optimizer, str):
        return _BY_NAME.get(optimizer.lower())
    if isinstance(optimizer, torch.optim.Optimizer):
        known, is_torch = _rule_with_kernel(type(optimizer)), type(optimizer).__module__.startswith("torch.optim.")
        refused = known.refused if known is not None and is_torch else ()  # a class of ours lacks them itself
        return None if any(group.get(option) for group in optimizer.param_groups for option in refused) else known
    kind = getattr(optimizer, "same_arithmetic_as", optimizer)
    return next((rule for known, rule in _BY_CLASS if known is kind), None)


def find_rule(optimizer: OptimizerLike) -> Rule:
    """Return the rule for an optimizer: one with a kernel if `has_rule`, else, for an optimizer object, which must be
    elementwise, one by which copies of it step.

    ValueError for a name or a class without a kernel, and for an object that a tier cannot step (`probe_states`).
    """
    found = _rule_with_kernel(optimizer)
    if found is None and isinstance(optimizer, torch.optim.Optimizer):
        return _rule_by_copies(optimizer)
    if found is None:
        told = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", repr(optimizer))
        raise ValueError(f"optimizer: expected Adagrad, Adam, AdamW, Lion or SGD, by name or class, got {told}")
    return found


def _rule_by_copies(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule by which copies of ``optimizer`` step. ValueError if a tier cannot step it, which a probe with a
    small tensor shows.
    """
    probed: dict[tuple[tuple[str, bool], ...], ProbedStates] = {}

    def states(group: Group) -> ProbedStates:
        """Return the states that ``optimizer`` keeps with the options of ``group``, probed once for every combination
        of options that are set and not set.
        """
        key = tuple((name, bool(value)) for name, value in group.items() if isinstance(value, (bool, int, float)))
        if key not in probed:
            probed[key] = probe_states(optimizer, group)
        return probed[key]

    for group in optimizer.param_groups:
        states(group)  # raises now, before anything is made
    return Rule(
        type(optimizer),
        lambda group: tuple((name, False) for name in states(group).moments),
        _zero_initial,
        None,
        ("differentiable",),
        make=partial(copy_of, optimizer, [torch.zeros(0)], optimizer.param_groups[0]),
        numbers=lambda group: states(group).numbers,
        count=lambda group: states(group).count,
    )
