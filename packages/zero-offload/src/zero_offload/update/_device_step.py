"""The arithmetic of torch's optimizer, over masters and moments of slices that stay on an accelerator, and of all
slices where there is no kernel. A span is consecutive elements of a fragment; a slice is the spans that are updated
together; a kind is one tensor of state: ``master`` or a moment. Numbers are the 0-D states that an optimizer keeps of a
fragment beside ``step``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import OffloadError
from ._probed_states import number_tensor, plain_step
from ._rules import Rule
from ._slices import MASTER, KeptFragment
from ._staging import StagedSpan

__all__ = ["DeviceSteps"]

_STEP = "step"
_HOST = torch.device("cpu")


class DeviceSteps:
    """Steps by torch's optimizer, for the slices whose index is ``first`` or more; ``index in steps`` tells whether a
    slice is one of these. Per step: `begin`, `run` for each slice, and `commit` if all went well.

    The optimizer is ``rule.template``, or what ``rule.make`` returns, with the options of the parameter groups, so the
    results have the bits of that optimizer without offload. Its states are the tensors of the tier, on ``device``. On
    an accelerator the host waits for nothing, unless weights are in host memory.
    """

    def __init__(self, rule: Rule, first: int, device: torch.device) -> None:
        self._rule = rule
        self._first = first
        self._device = device
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._parameters: dict[tuple[KeptFragment, int], torch.Tensor] = {}
        self._counted: dict[torch.Tensor, int] = {}
        self._numbers: dict[KeptFragment, dict[str, torch.Tensor]] = {}

    def __contains__(self, index: object) -> bool:
        """Return whether the slice with this index is updated here."""
        return isinstance(index, int) and index >= self._first

    def run(
        self,
        groups: Sequence[Mapping[str, Any]],
        staged_spans: Sequence[StagedSpan],
        tensors: Sequence[Mapping[str, torch.Tensor]],
        grad_scale: float,
    ) -> None:
        """Update the spans of one slice and write their new weights. ``groups``: the parameter groups, by number.
        ``staged_spans``: the spans that have a gradient, with gradients and weights. ``tensors``: the states of every
        span of the slice, by kind, updated in place. ``grad_scale`` multiplies gradients, which are not changed.
        OffloadError if the optimizer needs a state that was not loaded, or has begun to keep one that the tier has no
        room for.
        """
        by_group: dict[int, list[StagedSpan]] = {}
        for staged_span in staged_spans:
            by_group.setdefault(staged_span.span.fragment.plan.group, []).append(staged_span)
        for number, spans in by_group.items():
            optimizer = self._optimizer_for(number, groups[number])
            parameters = [self._parameter_for(one, tensors[one.number]) for one in spans]
            optimizer.param_groups[0]["params"] = parameters
            for one, parameter in zip(spans, parameters, strict=True):
                self._lend_states(optimizer, one.span.fragment, parameter, tensors[one.number])
                parameter.grad = one.grad.view().to(parameter.device, parameter.dtype, copy=grad_scale != 1.0)
            if grad_scale != 1.0:
                torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], grad_scale)
            try:
                plain_step(optimizer)
            finally:
                for parameter in parameters:
                    parameter.grad = None
            for one, parameter in zip(spans, parameters, strict=True):
                self._take_states(optimizer, one.span.fragment, parameter, tensors[one.number])
                if one.span.fragment.keeps_master:
                    _copy_if_moved(parameter, tensors[one.number][MASTER])
                (one.weights if self._device.type != "cpu" else one.out).view().copy_(parameter)
                parameter.data = parameter.new_empty(0)

    def begin(self) -> None:
        """Begin a step: forget the numbers computed in an earlier one that ended without `commit`."""
        self._numbers = {}

    def commit(self) -> None:
        """Set the ``numbers`` of each updated fragment to those of this step; call it once all slices have been
        updated.
        """
        for fragment, numbers in self._numbers.items():
            fragment.numbers = numbers
        self._numbers = {}

    def _optimizer_for(self, number: int, group: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return torch's optimizer for parameter group ``number``, made on first use, with the present options of
        ``group``. Its parameters are still those of the last `run`.
        """
        optimizer = self._optimizers.get(number)
        if optimizer is None:
            template: Any = self._rule.template
            made = template([torch.zeros(0, device=self._device)]) if self._rule.make is None else self._rule.make()
            optimizer = self._optimizers[number] = made
        own, options = optimizer.param_groups[0], {k: v for k, v in group.items() if k not in ("params", "param_names")}
        if self._rule.make is None:
            own.update({key: value for key, value in options.items() if key in own})
        else:  # no option of another group stays
            own.clear()
            own.update(options, params=[])
        if self._rule.fused and own["fused"] is None:
            own["fused"] = not own["foreach"]
        return optimizer

    def _parameter_for(self, staged_span: StagedSpan, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the tensor that the optimizer knows a span by: the same object at every step, with the span's master
        (from ``tensors``, by kind) as its content, or the span's weights on the device if there is no master.
        """
        fragment, key = staged_span.span.fragment, (staged_span.span.fragment, staged_span.span.begin)
        values = tensors[MASTER] if fragment.keeps_master else staged_span.weights.view().to(self._device)
        parameter = self._parameters.setdefault(key, values.detach())
        parameter.data = values
        return parameter

    def _lend_states(
        self,
        optimizer: torch.optim.Optimizer,
        fragment: KeptFragment,
        parameter: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Give the optimizer the states of a span (``tensors``, by kind) and its step number, as the state of
        ``parameter``. Before the first step an optimizer that ``rule.make`` has made gets none and makes its own; SGD's
        buffer is left out then, so that SGD sets it to the gradient. OffloadError if a state that the optimizer needs
        was not loaded.
        """
        if self._rule.make is not None and not fragment.has_moments:
            optimizer.state.pop(parameter, None)  # the optimizer makes its first states itself
            self._counted[parameter] = 1
            return
        if self._rule.make is not None and fragment.unwritten:
            raise self._missing_state_error(fragment, min(fragment.unwritten))
        state, group = optimizer.state[parameter], optimizer.param_groups[0]
        begins_anew = self._rule.template is torch.optim.SGD and not fragment.has_moments
        for kind in fragment.moments:
            state[kind.name] = None if begins_anew else tensors[kind.name]
        where = self._device if group.get("fused") or group.get("capturable") else _HOST
        count, like = state.get(_STEP), self._rule.count(group)
        if not isinstance(like, torch.Tensor):
            state.update({} if like is None else {_STEP: type(like)(fragment.step)})
        elif count is None or count.device.type != where.type or self._counted[parameter] != fragment.step:
            state[_STEP] = torch.full((), float(fragment.step), dtype=like.dtype, device=where)
        state.update(
            {n: self._number_for(fragment, n, example, where) for n, example in self._rule.numbers(group).items()}
        )
        self._counted[parameter] = fragment.step + 1

    def _number_for(self, fragment: KeptFragment, name: str, like: Any, where: torch.device) -> Any:
        """Return a fragment's number ``name`` in the type of ``like``: a new tensor on the device ``where`` if ``like``
        is a tensor, else a Python number. OffloadError if the fragment has no such number.
        """
        kept = fragment.numbers.get(name)
        if kept is None:
            raise self._missing_state_error(fragment, name)
        return kept.to(where, like.dtype, copy=True) if isinstance(like, torch.Tensor) else type(like)(kept.item())

    def _missing_state_error(self, fragment: KeptFragment, name: str) -> OffloadError:
        """Return the error, to be raised, for a fragment whose loaded states lack ``name``, of which only the optimizer
        knows the first value.
        """
        return OffloadError(
            f"'{fragment.name}': {self._rule.template.__name__} keeps '{name}', which the states that were loaded or "
            "written lack; load states of the same optimizer, or none, or write states after a step"
        )

    def _take_states(
        self,
        optimizer: torch.optim.Optimizer,
        fragment: KeptFragment,
        parameter: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy the states of ``parameter`` that the optimizer has made itself into those of the span (``tensors``, by
        kind); states that it updated in place need no copy. Keep its numbers for `commit`. OffloadError for a state
        that the probe of the optimizer has not shown, which would be lost.
        """
        if self._rule.make is not None:
            known = {_STEP, *(kind.name for kind in fragment.moments), *self._rule.numbers(optimizer.param_groups[0])}
            late = [
                name for name, value in optimizer.state[parameter].items() if value is not None and name not in known
            ]
            if late:
                raise OffloadError(
                    f"'{fragment.name}': {self._rule.template.__name__} has begun to keep '{late[0]}' in step "
                    f"{fragment.step + 1}, for which a tier has no room: have step() make all it keeps of a parameter "
                    "in the parameter's first step"
                )
        if names := self._rule.numbers(optimizer.param_groups[0]).keys():
            held = optimizer.state[parameter]
            self._numbers[fragment] = {name: number_tensor(held[name]).detach().cpu().clone() for name in names}
        for kind in fragment.moments:
            own = optimizer.state[parameter][kind.name]
            if own is not tensors[kind.name]:
                tensors[kind.name].copy_(own)
                optimizer.state[parameter][kind.name] = None


def _copy_if_moved(parameter: torch.Tensor, master: torch.Tensor) -> None:
    """Copy the values of ``parameter`` to ``master``, of the same shape, if they are in other memory: an optimizer's
    ``p.data = …`` puts them there.
    """
    if parameter.data_ptr() != master.data_ptr():
        master.copy_(parameter)
