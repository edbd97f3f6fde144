"""One optimizer step: bring each slice together, run the fused kernel on it, send the weights back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from ._couriers import Courier, Load
from ._entries import KERNEL_DTYPES, Entry, Fragment
from ._gradients import current_gradient
from ._rules import Batch, Rule
from ._tiers import Tier, Visit

__all__ = ["prepare", "update"]

Groups = Sequence[Mapping[str, Any]]
_MASTER = "master"


def update(
    rule: Rule,
    groups: Groups,
    slices: Sequence[tuple[Fragment, ...]],
    tier: Tier,
    courier: Courier,
    *,
    grad_scale: float,
) -> None:
    """Update every parameter that has a gradient; gradients are multiplied by ``grad_scale`` as they are read."""
    grads: dict[Entry, torch.Tensor] = {}
    for entry in {fragment.entry: None for slice_ in slices for fragment in slice_}:
        grad = current_gradient(entry)
        if grad is not None:
            grads[entry] = grad
    active = [i for i, slice_ in enumerate(slices) if any(fragment.entry in grads for fragment in slice_)]
    chosen = [[fragment for fragment in slices[i] if fragment.entry in grads] for i in active]
    loads = [[Load(f.of(grads[f.entry]), f.of(f.entry.param.detach())) for f in fragments] for fragments in chosen]
    if active:
        courier.fetch(0, loads[0])
    with closing(tier.visit(active, dirty=True)) as visits:  # type: ignore[type-var]
        for position, visit in enumerate(visits):
            if position + 1 < len(active):
                courier.fetch(position + 1, loads[position + 1])
            prepare(rule, groups, slices[visit.number], visit)
            _run(rule, groups, slices[visit.number], grads, visit, courier.loads(position), grad_scale)
            courier.send(position)
    courier.finish()
    for entry in grads:
        entry.step += 1
        torch.autograd.graph.increment_version(entry.param)
    for entry in grads:
        entry.version = entry.param._version


def prepare(rule: Rule, groups: Groups, slice_: Sequence[Fragment], visit: Visit) -> None:
    """Give a fresh slice its first values, and take over weights that were changed from outside."""
    for fragment, tensors in zip(slice_, visit.tensors, strict=True):
        entry = fragment.entry
        if visit.fresh:
            for kind, tensor in tensors.items():
                if kind != _MASTER:
                    tensor.fill_(rule.initial(groups[entry.group]))
        master = tensors.get(_MASTER)
        if master is None:
            continue
        if visit.fresh:
            master.copy_(fragment.of(entry.param.detach()))
        elif entry.version != entry.param._version:
            # Where the master rounds to the weight it is the same weight with more digits; elsewhere the weight is new.
            weights = fragment.of(entry.param.detach()).to(master.device)
            same = master.to(weights.dtype) == weights
            master.copy_(torch.where(same, master, weights.to(master.dtype)))


def _run(
    rule: Rule,
    groups: Groups,
    slice_: Sequence[Fragment],
    grads: Mapping[Entry, torch.Tensor],
    visit: Visit,
    loads: Sequence[Load],
    grad_scale: float,
) -> None:
    """One kernel call for all fragments of the slice that share options, step number and dtypes."""
    batches: dict[tuple[Any, ...], Batch] = {}
    members = [(f, t) for f, t in zip(slice_, visit.tensors, strict=True) if f.entry in grads]
    for (fragment, tensors), load in zip(members, loads, strict=True):
        entry = fragment.entry
        master = tensors.get(_MASTER)
        key = (entry.group, entry.step, entry.param.dtype, master is None)
        batch = batches.get(key)
        if batch is None:
            batch = batches[key] = _batch(entry, master is None, grad_scale)
        batch.sizes.append(fragment.length)
        batch.grads.append(load.grad.data_ptr())
        batch.params.append((load.weights if master is None else master).data_ptr())
        if master is not None:
            batch.common["copy_out"].append(load.weights.data_ptr())
        for kind, tensor in tensors.items():
            if kind != _MASTER:
                batch.states.setdefault(kind, []).append(tensor.data_ptr())
    for key, batch in batches.items():
        rule.run(batch, groups[key[0]])


def _batch(entry: Entry, in_place: bool, grad_scale: float) -> Batch:
    wide = KERNEL_DTYPES[entry.dtype]
    common: dict[str, Any] = {
        "step": entry.step + 1,
        "grad_scale": grad_scale,
        "param_dtype": wide,
        "grad_dtype": KERNEL_DTYPES[entry.param.dtype],
        "state_dtype": wide,
    }
    if not in_place:
        common["copy_out"] = []
        common["copy_dtype"] = KERNEL_DTYPES[entry.param.dtype]
    return Batch([], [], [], {}, common, first=entry.step == 0)
