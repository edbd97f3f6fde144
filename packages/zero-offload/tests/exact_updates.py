"""Exact updates of the two shards in `shards.py`, for the tests of the update beside backward."""

from __future__ import annotations

import dataclasses
from concurrent.futures import wait
from typing import Any

import torch
from shards import GROUPS, NUMELS, Lender, gradient, plans

from zero_offload import ExactUpdate, OffloadedUpdate, TierOptions


def exact_of(lender: Lender, dtype: torch.dtype, options: TierOptions | None = None, **more: Any) -> ExactUpdate:
    groups, optimizer = more.pop("groups", GROUPS), more.pop("optimizer", "AdamW")
    at_once = more.pop("at_once", ())
    shards = [
        dataclasses.replace(shard, read_at_once=shard.name in at_once)
        for shard in plans(dtype, in_place=more.pop("in_place", False))
    ]
    return ExactUpdate(shards, optimizer, lambda: groups, lender, options, device="cpu", **more)


def backward(update: OffloadedUpdate, step: int, dtype: torch.dtype = torch.float32, parts: int = 1) -> None:
    for _ in range(parts):
        for shard in reversed(NUMELS):
            into, again = update.borrow_gradient(shard)
            value = gradient(step, shard, dtype)
            into.copy_(into + value if again else value)
            update.give_back_gradient(shard)


def computed(update: ExactUpdate) -> None:
    """Wait until all that was begun beforehand is computed."""
    wait(future for future, _ in update._speculations._begun.values())
