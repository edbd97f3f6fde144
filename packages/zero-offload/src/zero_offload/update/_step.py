"""One step: stage each slice, run the fused kernel on it, send the weights back. A span is consecutive elements of a
fragment; a slice is the spans that are updated together; a kind is one tensor of state: ``master``, a moment, or the
scales of an 8-bit moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch

from ..trace import Trace
from ._device_step import DeviceSteps
from ._rules import KernelOperands, Rule
from ._slices import MASTER, FragmentSpan, KeptFragment, Slice
from ._staging import StagedSlices, StagedSpan
from ._tiers import Tier
from .plans import KERNEL_DTYPES

__all__ = ["Tensors", "count_step", "fill_moments", "run_kernels", "run_step"]

Groups = Sequence[Mapping[str, Any]]
Tensors = Mapping[str, torch.Tensor]


def run_step(
    rule: Rule,
    groups: Groups,
    slices: Sequence[Slice],
    tier: Tier,
    staged: StagedSlices,
    on_device: DeviceSteps,
    on_host: DeviceSteps | None,
    fragments: Collection[KeptFragment],
    *,
    absent: Collection[str],
    grad_scale: float,
    trace: Trace | None,
) -> None:
    """Update the weights, masters and moments of ``fragments``, slice by slice, with the kernels of ``rule``, or by
    ``on_device`` where it has the slice; by ``on_host`` instead of kernels if it is not None.

    ``groups``: the parameter groups, by number. ``slices``: all slices of the update, whose states are on ``tier``;
    those without one of ``fragments`` are skipped. ``staged``: brings gradients and weights. ``fragments`` are all that
    have a gradient and are not named in ``absent``. ``grad_scale`` multiplies gradients as they are read. ``trace``:
    records the computation.

    At the end the step count of each fragment is one higher, and its states count as held by the tier. On an error some
    weights are updated and others not; counts stay as they were.
    """
    for torch_steps in (on_device, on_host):
        if torch_steps is not None:
            torch_steps.begin()
    active = tier.order([i for i, slice_ in enumerate(slices) if any(span.fragment in fragments for span in slice_)])
    staged.begin(active, absent=absent, rewritten=_rewritten_shards(fragments))
    try:
        staged.start(0)
        with closing(tier.visit(active, dirty=True)) as visits:  # type: ignore[type-var]
            for position, visit in enumerate(visits):
                staged.start(position + 1)
                staged_spans = staged.staged_spans(position)
                stays = visit.number in on_device
                with nullcontext() if trace is None or stays else trace.span("compute", _names_text(staged_spans)):
                    for staged_span in staged_spans:
                        if not staged_span.span.fragment.is_settled:
                            _prepare_states(rule, groups, staged_span, visit.tensors[staged_span.number])
                    if stays:
                        on_device.run(groups, staged_spans, visit.tensors, grad_scale)
                    elif on_host is not None:
                        on_host.run(groups, staged_spans, visit.tensors, grad_scale)
                    else:
                        run_kernels(rule, groups, staged_spans, visit.tensors, grad_scale)
                staged.finish(position)
        staged.end()
    except BaseException:
        staged.abort()
        raise
    count_step(fragments)
    on_device.commit()
    if on_host is not None:
        on_host.commit()


def count_step(fragments: Iterable[KeptFragment]) -> None:
    """Count a step of each of ``fragments``, and mark their moments and masters as held by the tier and up to date."""
    for fragment in fragments:
        fragment.step += 1
        fragment.has_moments = True
        fragment.has_master = fragment.keeps_master
        fragment.weights_changed = False


def _names_text(staged_spans: Sequence[StagedSpan]) -> str:
    """Return the names of the shards of these spans as text: one name, or the first and the last; empty if there is
    none.
    """
    names = list(dict.fromkeys(staged_span.span.fragment.shard.name for staged_span in staged_spans))
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else ""


def _rewritten_shards(fragments: Collection[KeptFragment]) -> set[str]:
    """Return the names of the shards that a step over ``fragments`` writes completely without reading their weights:
    all elements but padding are in these fragments, and the masters of these are valid.
    """
    elements: dict[str, int] = {}
    for fragment in fragments:
        if fragment.has_master and not fragment.weights_changed:
            name = fragment.shard.name
            elements[name] = elements.get(name, fragment.shard.padding) + fragment.plan.numel
    return {fragment.shard.name for fragment in fragments if elements.get(fragment.shard.name) == fragment.shard.numel}


def _prepare_states(rule: Rule, groups: Groups, staged_span: StagedSpan, tensors: Tensors) -> None:
    """Make the states of a span valid in ``tensors``, by kind, before its kernel runs; ``groups``: the parameter
    groups, by number.

    Moments that the tier does not hold get their initial values, a missing master the weights. If weights were changed
    from outside, elements of the master that do not round to their weight are replaced by the weight.
    """
    fragment = staged_span.span.fragment
    if not fragment.has_moments:
        fill_moments(rule, groups, fragment, tensors)
    if not fragment.keeps_master:
        return
    master = tensors[MASTER]
    if not fragment.has_master:
        master.copy_(staged_span.weights.view())
    elif fragment.weights_changed:
        # Where the master rounds to the weight it is the same weight with more digits; elsewhere the weight is new.
        weights = staged_span.weights.view().to(master.device)
        same = master.to(weights.dtype) == weights
        master.copy_(torch.where(same, master, weights.to(master.dtype)))


def fill_moments(rule: Rule, groups: Groups, fragment: KeptFragment, tensors: Tensors) -> None:
    """Set the moments of a span of ``fragment``, in ``tensors`` by kind, to the initial value that ``rule`` gives for
    the fragment's parameter group.
    """
    for kind in fragment.moments:
        tensors[kind.name].fill_(rule.initial(groups[fragment.plan.group]))


def run_kernels(
    rule: Rule,
    groups: Groups,
    staged_spans: Sequence[StagedSpan],
    tensors: Sequence[Tensors],
    grad_scale: float,
    *,
    results: Sequence[Tensors] | None = None,
    threads: int = 0,
) -> None:
    """Run the kernel of ``rule`` over the spans of a slice, one call for all spans that have the same options, step
    number and dtypes; it writes new states in place and new weights to each staged span's ``out``.

    ``groups``: the parameter groups, by number. ``staged_spans``: the spans with their gradients and weights.
    ``tensors``: the states of every span of the slice, by kind. With ``results``, tensors of the same sizes, the new
    states go there, and ``tensors`` are only read. ``grad_scale`` multiplies gradients. ``threads``: of a kernel; 0: as
    many as the kernels choose. States below float32 are rounded stochastically by the element's position, so each of
    their spans gets a call of its own.
    """
    batches: dict[tuple[Any, ...], KernelOperands] = {}
    for staged_span in staged_spans:
        fragment, own = staged_span.span.fragment, tensors[staged_span.number]
        plan, shard = fragment.plan, fragment.shard
        low = bool(fragment.moments) and fragment.moments[0].dtype != fragment.dtype
        key = (
            plan.group,
            fragment.step,
            fragment.has_moments,
            shard.dtype,
            shard.grad_dtype,
            fragment.keeps_master,
            staged_span.number if low else None,
        )
        batch = batches.get(key)
        if batch is None:
            batch = batches[key] = _empty_operands(staged_span.span, grad_scale, apart=results is not None)
            batch.common["threads"] = threads
        batch.sizes.append(staged_span.span.length)
        batch.grads.append(staged_span.grad.address())
        out = staged_span.out.address()
        batch.params.append(own[MASTER].data_ptr() if fragment.keeps_master else staged_span.weights.address())
        if "copy_out" in batch.common:
            batch.common["copy_out"].append(out)
        for kind in fragment.moments:
            batch.states[kind.name].append(own[kind.name].data_ptr())
        if results is not None and batch.results is not None:
            new = results[staged_span.number]
            batch.results["param"].append(new[MASTER].data_ptr() if fragment.keeps_master else out)
            for kind in fragment.moments:
                batch.results[kind.name].append(new[kind.name].data_ptr())
    if rule.run is not None:
        for key, batch in batches.items():
            rule.run(batch, groups[key[0]])
    for staged_span in staged_spans:
        fragment = staged_span.span.fragment
        if fragment.keeps_master and fragment.dtype == torch.float64:  # of which the kernels write no second copy
            staged_span.out.view().copy_((results or tensors)[staged_span.number][MASTER])


def _empty_operands(span: FragmentSpan, grad_scale: float, *, apart: bool) -> KernelOperands:
    """Return the operands of a kernel call, still without spans, for all spans that share options, step number and
    dtypes with ``span``. ``grad_scale`` multiplies gradients. ``apart``: results go to memory of their own, whose
    addresses are added like the others.
    """
    fragment = span.fragment
    state = fragment.moments[0].dtype if fragment.moments else fragment.dtype
    common: dict[str, Any] = {
        "step": fragment.step + 1,
        "grad_scale": grad_scale,
        "param_dtype": KERNEL_DTYPES[fragment.dtype],
        "grad_dtype": KERNEL_DTYPES[fragment.shard.grad_dtype],
        "state_dtype": "int8" if state == torch.uint8 else KERNEL_DTYPES[state],
    }
    if state != fragment.dtype:
        common["element_offset"] = fragment.plan.element_offset + span.begin
    if fragment.keeps_master and fragment.dtype != torch.float64:
        common["copy_out"] = []
        common["copy_dtype"] = KERNEL_DTYPES[fragment.shard.dtype]
    states: dict[str, list[int]] = {kind.name: [] for kind in fragment.moments}
    results: dict[str, list[int]] | None = {name: [] for name in ("param", *states)} if apart else None
    return KernelOperands([], [], [], states, common, first=not fragment.has_moments, results=results)
