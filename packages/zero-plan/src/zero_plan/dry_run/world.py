"""A world of any size in which only one rank exists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend "fake")

from zero_comm import AlikeStore

from ..errors import PlanError


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Initialise torch.distributed in this process, inside the block, as rank ``rank`` of ``world_size``, with
    collectives that send nothing, wait for nobody and leave their results as they are; destroy it afterwards.

    Raises `PlanError` if torch.distributed is initialised already.
    """
    if dist.is_initialized():
        raise PlanError(
            "a dry run needs torch.distributed for itself, and it is initialised: plan before init_process_group and "
            "zero_core.initialize, or in a process of its own"
        )
    store = AlikeStore(world_size)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        if dist.is_initialized():  # scripts end it themselves
            dist.destroy_process_group()
