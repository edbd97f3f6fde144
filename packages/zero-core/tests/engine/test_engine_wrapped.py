"""torch's data-parallel wrappers around an engine or its model are refused, and training goes on as without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_cases import distance, outcome, start, train, weights
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zero_comm import run_ranks


class OwnDistributed(DistributedDataParallel):
    """A user's subclass."""


class Holder(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def first_part(engine: nn.Module) -> nn.Module:
    """The first submodule of the engine's model that has parameters of its own."""
    inner = (module for module in engine.module.modules() if module is not engine.module)
    return next(module for module in inner if next(module.parameters(recurse=False), None) is not None)


def tried(stage: int) -> dict[str, str]:
    engine, untouched = start(stage), start(stage)
    around: dict[str, Callable[[], object]] = {
        wrapper.__name__: lambda wrapper=wrapper: wrapper(engine)
        for wrapper in (DistributedDataParallel, OwnDistributed, DataParallel)
    }
    around["fully_shard"] = lambda: fully_shard(engine)
    around["DistributedDataParallel of the model"] = lambda: DistributedDataParallel(engine.module)
    around["DataParallel of the model"] = lambda: DataParallel(engine.module)
    around["DistributedDataParallel of what holds the engine"] = lambda: DistributedDataParallel(Holder(engine))
    around["DataParallel of what holds the model"] = lambda: DataParallel(nn.Sequential(Holder(engine.module)))
    around["DistributedDataParallel of a part of the model"] = lambda: DistributedDataParallel(first_part(engine))
    found = {name: outcome(call) for name, call in around.items()}
    Holder(engine), DistributedDataParallel(nn.Linear(2, 2)), DataParallel(nn.Linear(2, 2))
    train(engine, 0, 2)
    train(untouched, 0, 2)
    assert distance(weights(engine), weights(untouched)) == 0
    if stage == 0:
        found["FullyShardedDataParallel"] = outcome(
            lambda: FullyShardedDataParallel(engine, device_id=torch.device("cpu"))
        )
    engine.destroy()
    untouched.destroy()
    DistributedDataParallel(untouched.module)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_wrapper_around_an_engine_or_its_model_is_refused_by_its_name(world_size: int, stage: int) -> None:
    for refusals in run_ranks(tried, world_size, stage):
        for name, refusal in refusals.items():
            assert "PartitionError" in refusal and f"{name.partition(' ')[0]} " in refusal, (name, refusal)
            assert "engine.destroy()" in refusal, refusal
