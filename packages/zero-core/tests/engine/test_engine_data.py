"""The loader that `initialize` makes: whose samples, in which order, and where a resumed run continues."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import BATCH, INPUTS, OUTPUTS, RANKS, build, config, outcome, weights
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, SequentialSampler

import zero_core
from zero_comm import run_ranks
from zero_core.data_loader import RankSampler, rank_loader

CPU = torch.device("cpu")


class Noisy(Dataset):
    """Samples that draw from torch's generator, as augmentations do; the last element is the sample's number."""

    def __init__(self, size: int = 22) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, INPUTS, generator=generator, dtype=torch.float64)
        self.y = torch.randn(size, OUTPUTS, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index] + torch.randn(INPUTS, dtype=torch.float64) / 10, self.y[index], index


def loader_of(size: int, batch: int, rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    return rank_loader(list(range(size)), batch, rank=rank, ranks=ranks, device=CPU, **options)


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


@pytest.mark.parametrize("shuffle", (True, False))
@pytest.mark.parametrize(("size", "ranks"), [(12, 3), (13, 4), (3, 5), (1, 1)])
def test_the_order_is_that_of_torchs_distributed_sampler(size: int, ranks: int, shuffle: bool) -> None:
    for rank in range(ranks):
        theirs = DistributedSampler(range(size), ranks, rank, shuffle=shuffle)
        ours = RankSampler(size, rank, ranks, shuffle=shuffle)
        for epoch in (0, 3):
            theirs.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert list(ours) == list(theirs) and len(ours) == len(theirs)


@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_a_position_means_the_same_at_any_number_of_ranks(ranks: int) -> None:
    before = [loader_of(24, 2, rank, 2) for rank in range(2)]
    seen = [numbers(islice(loader, 3)) for loader in before]
    rest = []
    for rank in range(ranks):
        loader = loader_of(24, 1, rank, ranks)
        loader.load_state_dict(before[0].state_dict())
        rest += numbers(loader)
    assert sorted(seen[0] + seen[1] + rest) == list(range(24))


def test_every_pass_is_shuffled_anew_and_the_epoch_can_be_chosen() -> None:
    loader = loader_of(20, 3)
    first, second = numbers(loader), numbers(loader)
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    loader.data_sampler.set_epoch(0)
    assert numbers(loader) == first
    next(iter(loader))  # a pass that is left early is over when the next begins
    third = numbers(loader)
    loader.data_sampler.set_epoch(2)
    assert third == numbers(loader) != second


def test_incomplete_batches_are_handed_out_or_dropped() -> None:
    for drop_last, sizes in ((False, [4, 4, 2]), (True, [4, 4])):
        loader = loader_of(19, 4, 1, 2, drop_last=drop_last)
        assert [len(batch) for batch in loader] == sizes and len(loader) == len(sizes)
        assert loader.state_dict() == {"sampler": {"epoch": 1, "position": 0, "seed": 0, "size": 19}}


def test_a_repeating_loader_goes_on_with_the_next_epoch_and_from_a_position() -> None:
    whole = [int(n) for n in loader_of(5, 1)]
    loader = loader_of(5, 1)
    endless = zero_core.RepeatingLoader(loader)
    first = [int(next(endless)) for _ in range(8)]
    assert first[:5] == whole and sorted({*first[5:]} & {*whole}) == sorted(first[5:])
    resumed = loader_of(5, 1)
    resumed.load_state_dict(loader.state_dict())
    follows, would = zero_core.RepeatingLoader(resumed), [int(next(endless)) for _ in range(9)]
    assert [int(next(follows)) for _ in range(9)] == would
    with pytest.raises(StopIteration):
        next(zero_core.RepeatingLoader([]))


@pytest.mark.parametrize("virtual_ranks", (0, 2))
def test_an_iteration_under_way_does_not_go_on_after_a_position_was_loaded(virtual_ranks: int) -> None:
    loader = loader_of(12, 2, virtual_ranks=virtual_ranks)
    start, batches = loader.state_dict(), zero_core.RepeatingLoader(loader)
    first = numbers(islice(batches, 4))
    loader.load_state_dict(start)
    with pytest.raises(zero_core.UsageError, match="position in the data was loaded .* iteration over the loader was"):
        next(batches)
    assert numbers(islice(zero_core.RepeatingLoader(loader), 4)) == first


@pytest.mark.parametrize("ranks", (1, 3))
def test_a_loop_over_epochs_goes_on_with_the_loaded_one_and_going_back_is_said(
    ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    def epochs_of(loader: Any, first: int) -> list[list[int]]:
        seen = []
        for epoch in range(first, 3):
            loader.data_sampler.set_epoch(epoch)
            seen.append(numbers(loader))
        return seen

    options = {"rank": 0, "ranks": ranks, "drop_last": True}
    undisturbed = epochs_of(loader_of(20, 2, **options), 0)
    before = loader_of(20, 2, **options)
    before.data_sampler.set_epoch(0)
    numbers(before)
    before.data_sampler.set_epoch(1)
    half = numbers(islice(before, 2))
    after = loader_of(20, 2, **options)
    after.load_state_dict(before.state_dict())
    with caplog.at_level(logging.WARNING, "zero_core"):
        rest = epochs_of(after, after.data_sampler.epoch)
    assert [half + rest[0], *rest[1:]] == undisturbed[1:] and not caplog.records
    after.load_state_dict(before.state_dict())
    with caplog.at_level(logging.WARNING, "zero_core"):
        epochs_of(after, 0)
    (record,) = caplog.records
    assert "set_epoch(0) goes back from the checkpoint's position, epoch 1" in record.getMessage()
    assert "range(loader.data_sampler.epoch, epochs)" in record.getMessage()


def test_workers_that_read_ahead_do_not_move_the_position() -> None:
    loader = loader_of(12, 2, workers=2)
    assert len(numbers(islice(loader, 2))) == 4
    assert loader.state_dict()["sampler"]["position"] == 4


def start(stage: int, size: int = 22, **changes: Any) -> Any:
    engine, _, loader, _ = zero_core.initialize(
        model=build(), training_data=Noisy(size), config=config(stage, **changes)
    )
    return engine, loader


def steps(engine: Any, batches: Any, count: int) -> list[bytes]:
    """Train on ``count`` batches; returns what was seen, bit by bit."""
    seen = []
    for x, y, index in islice(batches, count):
        engine.backward(engine(x, y))
        engine.step()
        seen.append(x.numpy().tobytes() + index.numpy().tobytes())
    return seen


def resume(folder: str, stage: int, before: int) -> list[bool]:
    engine, loader = start(stage)
    batches = zero_core.RepeatingLoader(loader)
    steps(engine, batches, before)
    engine.save_checkpoint(folder)
    would, end = steps(engine, batches, 9), weights(engine)
    fresh, again = start(stage)
    torch.manual_seed(99)
    fresh.load_checkpoint(folder)
    follows = steps(fresh, zero_core.RepeatingLoader(again), 9)
    return [would == follows, len(set(would)) == 9, all(bool((v == end[n]).all()) for n, v in weights(fresh).items())]


@pytest.mark.parametrize(("stage", "before"), [(0, 2), (3, 6), (3, 8)])
def test_a_resumed_run_sees_the_batches_that_would_have_followed(stage: int, before: int, tmp_path: Path) -> None:
    """Six batches are an epoch: from its middle, its end, and the middle of the next."""
    assert run_ranks(resume, RANKS, str(tmp_path), stage, before) == [[True] * 3] * RANKS


def save_position(folder: str) -> list[int]:
    engine, loader = start(1)
    seen = [number for _, _, index in islice(loader, 3) for number in index.tolist()]
    engine.save_checkpoint(folder)
    return seen


def load_position(folder: str, options: dict[str, Any]) -> list[int]:
    engine, loader = start(1)
    engine.load_checkpoint(folder, **options)
    return [number for _, _, index in loader for number in index.tolist()]


def test_a_position_is_loaded_at_another_number_of_ranks_unless_only_the_model_is(tmp_path: Path) -> None:
    seen = [number for numbers in run_ranks(save_position, RANKS, str(tmp_path)) for number in numbers]
    (rest,) = run_ranks(load_position, 1, str(tmp_path), {})
    assert sorted(seen + rest) == list(range(22))
    (whole,) = run_ranks(load_position, 1, str(tmp_path), {"load_module_only": True})
    assert sorted(whole) == list(range(22))


def test_a_position_that_does_not_fit_is_refused_and_a_missing_one_is_said(
    alone: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = start(0)
    engine.save_checkpoint(tmp_path, tag="with")
    other, loader = start(0, size=20)
    message = outcome(lambda: other.load_checkpoint(tmp_path, tag="with"))
    assert "20 samples" in message and "of 22" in message, message
    other.training_dataloader = None
    other.load_checkpoint(tmp_path, tag="with")
    other.save_checkpoint(tmp_path, tag="without")
    with caplog.at_level(logging.WARNING, logger="zero_core"):
        engine.load_checkpoint(tmp_path, tag="without")
    assert "no position in the training data" in caplog.text
    assert len(list(loader)) == 5


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_the_loader_takes_its_settings_from_the_configuration_and_refuses_streams(alone: None) -> None:
    engine = zero_core.initialize(
        model=build(),
        training_data=Noisy(),
        collate_fn=lambda samples: [index for _, _, index in samples],
        config=config(0, dataloader_drop_last=True),
    )[0]
    assert [len(batch) for batch in engine.training_dataloader] == [BATCH] * 5
    in_order = engine.data_loader(Noisy(6), batch_size=4, route="eval")
    assert list(in_order) == [[0, 1, 2, 3]]
    own = engine.data_loader(Noisy(6), data_sampler=SequentialSampler(range(6)))
    assert own.state_dict() is None and list(own) == [[0, 1, 2, 3]]
    assert outcome(lambda: engine.data_loader(Noisy(), route="test")).startswith("UsageError")
    message = outcome(lambda: engine.data_loader(Stream()))
    assert message.startswith("UsageError: training_data") and "Stream" in message
