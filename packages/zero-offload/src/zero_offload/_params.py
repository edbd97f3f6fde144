"""Parameters as shards: each parameter is a shard with one fragment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from .update import FragmentPlan, ShardPlan
from .update.plans import KERNEL_DTYPES, wide_dtype

__all__ = [
    "GradientHooks",
    "Member",
    "ParameterWeights",
    "check_gradient",
    "check_parameter",
    "flat_gradient",
    "shard_plans",
]

_ANCHOR = 256


@dataclass(eq=False)
class Member:
    """A parameter that is updated, its name and the number of its group. ``version``: the parameter's autograd version
    when its weights last equalled its masters; None if they never did.
    """

    name: str
    param: torch.nn.Parameter
    group: int
    version: int | None = None


def shard_plans(members: Sequence[Member]) -> list[ShardPlan]:
    """Return a shard plan for each parameter that has elements, in order. Each has one fragment, and is updated in
    place if the parameter is on the CPU and in the dtype of the update. The fragments' ``element_offset``s, for
    stochastic rounding, follow each other at multiples of 256.
    """
    made: list[ShardPlan] = []
    position = 0
    for member in members:
        param = member.param
        numel = param.numel()
        if numel:
            in_place = param.device.type == "cpu" and param.dtype == wide_dtype(param.dtype)
            fragment = FragmentPlan(member.name, 0, numel, member.group, position)
            made.append(ShardPlan(member.name, numel, param.dtype, param.dtype, (fragment,), in_place))
            position += -(-numel // _ANCHOR) * _ANCHOR
    return made


class ParameterWeights:
    """The `Weights` of an update over ``members``: it lends the parameters' own memory, by the members' names."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._params = {member.name: member.param for member in members}

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """Return the parameter's own elements as a 1-D view, writable at any time; ``fresh`` changes nothing."""
        return self._params[name].detach().view(-1)

    def give_back(self, name: str, *, dirty: bool) -> None:
        """Do nothing: `borrow` lent the parameter's own memory, which is written already."""


def check_parameter(member: Member) -> None:
    """Raise TypeError, naming the parameter, unless it is float32, bfloat16 or float16, or float64 on the CPU."""
    param = member.param
    if param.dtype not in KERNEL_DTYPES or (param.dtype == torch.float64 and param.device.type != "cpu"):
        raise TypeError(
            f"'{member.name}': expected float32, bfloat16 or float16 (float64 on the CPU), "
            f"got {param.dtype} on {param.device}"
        )


def check_gradient(member: Member) -> None:
    """Raise TypeError or ValueError, naming the parameter, if the kernels cannot read its gradient (sparse, of another
    dtype or device) or the parameter is not contiguous. A parameter without a gradient passes.
    """
    param, grad = member.param, member.param.grad
    if not param.is_contiguous():
        raise ValueError(
            f"'{member.name}': expected a contiguous parameter, got strides {param.stride()} for {tuple(param.shape)}"
        )
    if grad is None:
        return
    if grad.layout != torch.strided:
        raise TypeError(
            f"'{member.name}': sparse gradients are not supported, got layout {grad.layout}; use sparse=False"
        )
    if grad.dtype != param.dtype or grad.device != param.device:
        raise TypeError(
            f"'{member.name}': expected a gradient of {param.dtype} on {param.device}, "
            f"got {grad.dtype} on {grad.device}"
        )


def flat_gradient(member: Member) -> torch.Tensor | None:
    """Return the gradient in ``p.grad`` without its graph, 1-D and contiguous, copied only if it is not contiguous;
    None if there is none.
    """
    grad = member.param.grad
    return None if grad is None else grad.detach().contiguous().view(-1)


class GradientHooks:
    """Passes the gradient of each of ``members``' parameters to ``take(name, gradient)``, 1-D, as soon as autograd has
    finished it, then sets ``p.grad`` to None, until `close`. ``take`` runs inside backward, for an accelerator's
    gradients on a thread of autograd's. Parameters without elements have no hook.
    """

    def __init__(self, members: Sequence[Member], take: Callable[[str, torch.Tensor], object]) -> None:
        self._take = take
        self._handles: list[RemovableHandle] = [
            member.param.register_post_accumulate_grad_hook(partial(self._take_gradient, member))  # type: ignore[no-untyped-call]
            for member in members
            if member.param.numel()
        ]

    def close(self) -> None:
        """Remove the hooks; gradients stay in ``p.grad`` from then on."""
        for handle in self._handles:
            handle.remove()

    def _take_gradient(self, member: Member, param: torch.Tensor) -> None:
        """Pass the gradient of ``param``, the member's parameter, to the constructor's ``take`` and set it to None; do
        nothing if it has none. TypeError or ValueError, which backward raises, if the kernels cannot read it.
        """
        check_gradient(member)
        grad = flat_gradient(member)
        if grad is not None:
            self._take(member.name, grad)
            param.grad = None
