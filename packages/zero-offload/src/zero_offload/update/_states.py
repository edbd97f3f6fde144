"""Masters and moments as plain tensors: read from the tier and written to it, slice by slice.

A span is consecutive elements of a fragment; a slice is the spans that are loaded together. A kind is one tensor of
state: ``master``, a moment, or the scales of an 8-bit moment. A state maps kinds, and ``step``, to tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

import torch

from zero_optim_kernels import dequantize_blocks, quantize_blocks

from .._protocols import Generation
from ..sealed import Sealed
from ._probed_states import number_tensor
from ._rules import Rule
from ._slices import BLOCK, MASTER, FragmentSpan, KeptFragment, Slice, StateKind
from ._step import Groups, Tensors, fill_moments
from ._tiers import Tier

__all__ = ["as_values", "check_state", "forget_states", "read_states", "sealed_state", "write_states"]

State = Mapping[str, Any]
_STEP = "step"
_SCALE = "_scale"


def sealed_state(
    fragments: Sequence[KeptFragment], in_memory: Sequence[Slice], tier: Tier, generations: Sequence[Generation]
) -> Sealed:
    """Return the current state of ``tier``, which was just sealed: the extents of the kinds that it holds of
    ``fragments``, in the files of ``generations``. Fragments with a span in the slices ``in_memory`` are listed as
    resident.
    """
    begun = {f"{f.name}/{kind.name}" for f in fragments for kind in f.kinds if f.keeps(kind)}
    return Sealed.of(
        {name: found for name, found in tier.extents().items() if name in begun},
        generations,
        steps={f.name: f.step for f in fragments},
        resident=frozenset(span.fragment.name for slice_ in in_memory for span in slice_),
    )


def read_states(
    fragments: Sequence[KeptFragment], slices: Sequence[Slice], tier: Tier, *, stale: bool = False
) -> Iterator[tuple[KeptFragment, dict[str, torch.Tensor]]]:
    """Yield (fragment, state) for each of ``fragments`` that has any state, in one pass over the slices. A state has
    1-D copies in host memory, by kind, of all elements of the fragment; its ``step`` and the optimizer's numbers have
    no dimension.

    ``stale``: include masters that are out of date because weights were changed from outside and no step has replaced
    them yet.
    """
    wanted = {f for f in fragments if any(f.keeps(kind, stale=stale) for kind in f.kinds) or f.step}
    last = {span.fragment: index for index, slice_ in enumerate(slices) for span in slice_ if span.fragment in wanted}
    states: dict[KeptFragment, dict[str, torch.Tensor]] = {}
    indices = [i for i, slice_ in enumerate(slices) if any(span.fragment in last for span in slice_)]
    with closing(tier.visit(indices, dirty=False)) as visits:  # type: ignore[type-var]
        for visit in visits:
            for span, tensors in zip(slices[visit.number], visit.tensors, strict=True):
                if span.fragment in wanted:
                    _read_span(span, tensors, states.setdefault(span.fragment, {}), stale=stale)
            for fragment in [f for f in states if last[f] == visit.number]:
                numbers = {name: number.clone() for name, number in fragment.numbers.items()}
                yield fragment, {_STEP: torch.tensor(float(fragment.step)), **numbers, **states.pop(fragment)}


def _read_span(span: FragmentSpan, tensors: Tensors, state: dict[str, torch.Tensor], *, stale: bool) -> None:
    """Copy those of a span's ``tensors``, by kind, that the tier holds into the fragment's ``state``, to which a tensor
    for the whole fragment is added when a kind comes first. ``stale``: include a master that is out of date because the
    weights were changed.
    """
    fragment = span.fragment
    for kind in fragment.kinds:
        if fragment.keeps(kind, stale=stale):
            whole = state.setdefault(kind.name, torch.empty(kind.items(fragment.plan.numel), dtype=kind.dtype))
            span.of_kind(kind, whole).copy_(tensors[kind.name])


def as_values(fragment: KeptFragment, state: State) -> dict[str, torch.Tensor]:
    """Return a fragment's state with 8-bit moments decoded to float32, in new tensors, and without their scales; other
    kinds are the same tensors.
    """
    values = {name: kept for name, kept in state.items() if not name.endswith(_SCALE)}
    for kind in fragment.moments:
        if kind.dtype == torch.uint8 and kind.name in state:
            codes, scales = state[kind.name], state[kind.name + _SCALE]
            wide = torch.empty(codes.shape, dtype=torch.float32)
            addresses = codes.data_ptr(), scales.data_ptr(), wide.data_ptr()
            dequantize_blocks(*addresses, wide.numel(), code=_code_format(kind), block=BLOCK)
            values[kind.name] = wide
    return values


def _code_format(kind: StateKind) -> Literal["e4m3", "u5e3"]:
    """Return the 8-bit format of a moment's codes: "u5e3", which is unsigned, for a second moment, else "e4m3"."""
    return "u5e3" if kind.second else "e4m3"


def check_state(rule: Rule, groups: Groups, fragment: KeptFragment, state: State) -> None:
    """Raise ValueError, naming the fragment, if ``state`` has a kind that the fragment does not have, a kind of another
    size, or 8-bit codes without their scales. Kinds may be missing. ``rule``: of the optimizer; ``groups``: the
    parameter groups, by number.
    """
    kinds = {kind.name: kind for kind in fragment.kinds}
    known = {_STEP, *kinds, *rule.numbers(groups[fragment.plan.group])}
    unknown = sorted(set(state) - known)
    if unknown:
        raise ValueError(f"'{fragment.name}': expected states among {sorted(known)}, got {', '.join(unknown)}")
    for name in state.keys() & kinds.keys():
        items = kinds[name].items(fragment.plan.numel)
        if state[name].shape != (items,):
            raise ValueError(
                f"'{fragment.name}': expected '{name}' of shape ({items},), got {tuple(state[name].shape)}"
            )
        scale = name + _SCALE
        if state[name].dtype == torch.uint8 and not (scale in kinds and scale in state):
            raise ValueError(f"'{fragment.name}': '{name}' is 8-bit codes, and there is no '{scale}' to it here")


def write_states(
    rule: Rule, groups: Groups, slices: Sequence[Slice], tier: Tier, states: Mapping[KeptFragment, State]
) -> None:
    """Replace the given kinds of state of each fragment on the tier, and its step count if given. If a fragment had no
    moments, those that are not given get their initial values.

    8-bit moments are taken as codes and scales, or in any floating dtype. ``rule``: of the optimizer; ``groups``: the
    parameter groups, by number. A state must pass `check_state`. A master that is given counts as equal to the current
    weights. The fragment counts as having moments if one, a number, or a step count above 0 is given.
    """
    indices = [i for i, slice_ in enumerate(slices) if any(_has_state(span, states) for span in slice_)]
    with closing(tier.visit(indices, dirty=True)) as visits:  # type: ignore[type-var]
        for visit in visits:
            for span, tensors in zip(slices[visit.number], visit.tensors, strict=True):
                if _has_state(span, states):
                    if not span.fragment.has_moments:
                        fill_moments(rule, groups, span.fragment, tensors)
                    _write_span(span, tensors, states[span.fragment])
    for fragment, state in states.items():
        missing = fragment.unwritten if fragment.has_moments else {kind.name for kind in fragment.moments}
        fragment.has_moments |= bool(set(state) - {MASTER, _STEP}) or bool(state.get(_STEP))
        fragment.unwritten = missing - state.keys() if fragment.has_moments else set()
        if MASTER in state:
            fragment.has_master, fragment.weights_changed = True, False
        if _STEP in state:
            fragment.step = int(state[_STEP])
        for name, like in rule.numbers(groups[fragment.plan.group]).items():
            if name in state:
                dtype = number_tensor(like).dtype
                fragment.numbers[name] = number_tensor(state[name]).to("cpu", dtype, copy=True).reshape(())


def _has_state(span: FragmentSpan, states: Mapping[KeptFragment, State]) -> bool:
    """Return whether ``states`` has a state for the span's fragment."""
    return span.fragment in states


def _write_span(span: FragmentSpan, tensors: Tensors, state: State) -> None:
    """Copy the span's part of each kind in ``state``, which has all of the fragment, into the span's ``tensors``;
    floating moments are encoded where the tier keeps 8-bit codes. Kinds that are not in ``state`` stay.
    """
    for kind in span.fragment.kinds:
        value = state.get(kind.name)
        if value is None:
            continue
        part = span.of_kind(kind, value.detach())
        if kind.dtype == torch.uint8 and value.dtype != torch.uint8:
            wide = part.to("cpu", torch.float32).contiguous()
            codes, scales = tensors[kind.name], tensors[kind.name + _SCALE]
            addresses = wide.data_ptr(), codes.data_ptr(), scales.data_ptr()
            quantize_blocks(*addresses, span.length, code=_code_format(kind), block=BLOCK)
        else:
            tensors[kind.name].copy_(part)


def forget_states(fragments: Sequence[KeptFragment]) -> None:
    """Mark the fragments as having no state and no steps taken; the tier's content is not touched."""
    for fragment in fragments:
        fragment.step, fragment.numbers, fragment.unwritten = 0, {}, set()
        fragment.has_moments = fragment.has_master = fragment.weights_changed = False
