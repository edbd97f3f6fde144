"""`train_batch` under DeepSpeed's names: the call of its PipelineEngine, for every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from named_cases import BATCH, batch, build, settings, start, train
from torch.utils.data import TensorDataset

from zero_comm import run_ranks
from zero_core.errors import UsageError
from zero_deepspeed.engine import DeepSpeedEngine, StageError
from zero_deepspeed.initialization import initialize

ACCUMULATED = 2


def weights(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    return [engine.full_param(p) for p in engine.module.parameters()]


def stepped(stage: int) -> tuple[list[float], list[float], bool]:
    """The losses that `train_batch` returns, those of the ordinary loop by rank and step, and whether the weights are
    the same."""
    loop = start(stage, gradient_accumulation_steps=ACCUMULATED)
    losses = train(loop, 0, 3 * ACCUMULATED)
    engine = start(stage, gradient_accumulation_steps=ACCUMULATED)
    source = (batch(number) for number in range(100))
    returned = [float(engine.train_batch(data_iter=source)) for _ in range(2)]
    returned.append(float(engine.train_batch([next(source), next(source)])))
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(weights(engine), weights(loop), strict=True))
    assert engine.global_steps == 3 and next(source).equal(batch(3 * ACCUMULATED))
    engine.destroy()
    loop.destroy()
    return returned, losses, same


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_takes_the_iterators_next_micro_batches_and_returns_the_mean_loss_of_all_ranks(stage: int) -> None:
    answers = run_ranks(stepped, 2, stage)
    means = torch.tensor([losses for _, losses, _ in answers]).view(2, 3, ACCUMULATED).mean((0, 2))
    for returned, _, same in answers:
        assert returned == pytest.approx(means.tolist(), rel=1e-5)
        assert same


def fed_by_training_data(folder: Path) -> list[Any]:
    """The weights after five steps over two epochs of training data; the same with a checkpoint before the fourth,
    loaded into an engine that has begun to iterate."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(7 * BATCH, 24))
    found = []
    for saves in (False, True):
        config = settings(3, gradient_accumulation_steps=ACCUMULATED)
        engine = initialize(model=build(), config=config, training_data=data)[0]
        for step in range(5):
            if saves and step == 3:
                engine.save_checkpoint(folder)
                engine.train_batch()
                engine.load_checkpoint(folder)
            engine.train_batch()
        found.append(b"".join(w.numpy().tobytes() for w in weights(engine)))
        epoch = engine.training_dataloader.data_sampler.epoch
        engine.destroy()
    return [*found, epoch]


def test_training_data_are_the_default_and_begin_again_at_their_end(tmp_path: Path) -> None:
    for whole, resumed, epoch in run_ranks(fed_by_training_data, 2, tmp_path):
        assert whole == resumed
        assert epoch == 1


def refused() -> None:
    engine = start(1, gradient_accumulation_steps=ACCUMULATED)
    with pytest.raises(UsageError, match="data_iter, or training_data"):
        engine.train_batch()
    with engine.no_sync(), pytest.raises(StageError, match=r"train_batch\(\) inside no_sync"):
        engine.train_batch(iter([batch(0), batch(1)]))
    with pytest.raises(UsageError, match=f"rank {dist.get_world_size() - 1} expected .* = 2 micro-batches, got 1"):
        last = dist.get_rank() == dist.get_world_size() - 1
        engine.train_batch(iter([batch(0)] if last else [batch(0), batch(1)]))
    engine.destroy()


def test_what_is_no_step_is_refused_by_name_on_every_rank() -> None:
    run_ranks(refused, 2)
