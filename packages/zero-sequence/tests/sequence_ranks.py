"""What the multi-rank tests of this package share; module level, so that worker processes can import it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zero_comm import Group, Ledger


def world(ledger: Ledger | None = None) -> Group:
    """A group over all ranks that `run_ranks` started."""
    return Group(None if dist.get_world_size() == 1 else dist.group.WORLD, ledger=ledger)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same random tensor wherever it is asked for."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def failure_of(call: object, *args: object, **named: object) -> str:
    """The type and text of what the call raises; "none" when it returns."""
    try:
        call(*args, **named)  # type: ignore[operator]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"
