"""Makes the fragments of shards with their kinds of state, and checks options of parameter groups against them.

A kind is one tensor of state: ``master``, a moment, or the scales of an 8-bit moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._rules import Rule
from ._slices import BLOCK, KeptFragment, kinds_of
from .plans import ShardPlan

__all__ = ["check_same_moments", "make_fragments"]


def make_fragments(
    shard: ShardPlan, rule: Rule, groups: Sequence[Mapping[str, Any]], state_dtype: torch.dtype | None
) -> list[KeptFragment]:
    """Return the fragments of a shard, in order, each with its kinds of state for the optimizer's ``rule``.

    ``state_dtype``: that of the moments (int8: 8-bit codes in blocks), None for the default; a float64 shard ignores
    it. ValueError for options of the parameter ``groups`` that the kernels cannot do, and for 8-bit moments of a
    fragment that does not begin at a block or whose moments do not begin with 0.
    """
    fragments = []
    state_dtype = None if shard.dtype == torch.float64 else state_dtype
    for plan in shard.fragments:
        group = groups[plan.group]
        rule.check_group(group)
        if state_dtype == torch.int8 and plan.element_offset % BLOCK:
            raise ValueError(
                f"'{plan.name}': 8-bit states are in blocks of {BLOCK} elements; expected an element_offset that "
                f"is a multiple of it, got {plan.element_offset}"
            )
        if state_dtype == torch.int8 and rule.initial(group):
            raise ValueError(f"'{plan.name}': 8-bit states begin with 0, got a first value in group {plan.group}")
        fragments.append(KeptFragment(plan, shard, kinds_of(shard, rule.moments(group), state_dtype)))
    return fragments


def check_same_moments(fragment: KeptFragment, rule: Rule, group: Mapping[str, Any]) -> None:
    """Raise ValueError if the options of ``group``, the fragment's parameter group, would give the fragment other
    moments than it has.
    """
    kept = list(dict.fromkeys(kind.moment for kind in fragment.moments))
    moments = [name for name, _ in rule.moments(group)]
    if kept != moments:
        raise ValueError(
            f"'{fragment.name}': the options of group {fragment.plan.group} change which states there are, from {kept} "
            f"to {moments}; make a new optimizer with them"
        )
