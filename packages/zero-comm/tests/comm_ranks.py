"""What the multi-rank tests of this package share; module level, so that worker processes can import it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zero_comm import EngineGroups, Group, Ledger, Mesh


def data_group(ledger: Ledger | None = None, *, deterministic: bool = False) -> Group:
    """A group over all ranks that `run_ranks` started."""
    alone = dist.get_world_size() == 1
    return Group(None if alone else dist.group.WORLD, ledger=ledger, deterministic=deterministic)


def engine_groups() -> EngineGroups:
    """The three process groups of one engine over all ranks."""
    return Mesh(device=torch.device("cpu")).open_groups()


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The same random tensor wherever it is asked for, different for each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def own_lines(stdout: str) -> list[str]:
    """Return what the script itself printed: up to torch 2.10, gloo names its connections on standard output."""
    return [line for line in stdout.splitlines() if not line.startswith("[Gloo]")]


def failure_of(call: object, *args: object) -> str:
    """The type and text of what ``call(*args)`` raises; "none" when it returns."""
    try:
        call(*args)  # type: ignore[operator]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"
