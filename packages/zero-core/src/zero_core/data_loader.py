"""The data loader that `initialize` makes: each rank's own samples, with a position that checkpoints save."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle, islice
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from .errors import UsageError

logger = logging.getLogger("zero_core")

_Batch = TypeVar("_Batch")


class RankSampler(Sampler[int]):
    """Yields the sample numbers of one rank, in the order of torch's DistributedSampler, from any position of an epoch.
    ``size``: samples of the full data set. ``shuffle``: by ``seed + epoch``, the same on every rank. All ranks get the
    same number; if they do not divide evenly, the first samples of the order are repeated for the last ranks. The
    position counts the epoch's samples drawn so far by all ranks, so it means the same at any number of ranks."""

    def __init__(self, size: int, rank: int, ranks: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self.size, self.rank, self.ranks = size, rank, ranks
        self.shuffle, self.seed = shuffle, seed
        self.epoch = 0
        self._position = 0
        self._begun = False
        self._loaded = False
        self.loads = 0
        """Number of positions loaded so far."""

    def __len__(self) -> int:
        """Return the number of samples of this rank in a full epoch."""
        return math.ceil(self.size / self.ranks)

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this rank's sample numbers from the position on. Iterating does not move the
        position."""
        order = self._order()
        rest = order[self._position :]
        rest += islice(cycle(order), -len(rest) % self.ranks)
        return iter(rest[self.rank :: self.ranks])

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` with the next iteration, at its start, or at the position that was loaded if it is in this
        epoch. Logs a warning on rank 0 if that goes back to an epoch before a loaded position, as it repeats data."""
        if self._loaded and not self._begun and epoch < self.epoch and self.rank == 0:
            logger.warning(
                "set_epoch(%d) goes back from the checkpoint's position, epoch %d: data that were seen come again; to "
                "continue with the next batch, loop over range(loader.data_sampler.epoch, epochs)",
                *(epoch, self.epoch),
            )
        if epoch != self.epoch or self._begun:
            self.epoch, self._position = epoch, 0
        self._begun = self._loaded = False

    def begin(self) -> None:
        """Prepare for an iteration: if one has begun in this epoch and was left before its end, move to the next
        epoch."""
        if self._begun:
            self.set_epoch(self.epoch + 1)
        self._begun = True

    def advance(self, per_rank: int, min_left: int) -> None:
        """Move the position by ``per_rank`` samples on each rank; to the next epoch if fewer than ``min_left`` remain
        on each."""
        self._position += per_rank * self.ranks
        if math.ceil((self.size - self._position) / self.ranks) < min_left:
            self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next sample: epoch, samples drawn in it by all ranks, seed, and data set size."""
        return {"epoch": self.epoch, "position": self._position, "seed": self.seed, "size": self.size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Move to a position from `state_dict`, of any number of ranks. Raises `UsageError` for a data set of another
        size."""
        if state["size"] != self.size:
            raise UsageError(
                f"training_data has {self.size} samples, but the checkpoint's position is sample {state['position']} "
                f"of {state['size']}: load it with the same data, or with engine.training_dataloader set to None"
            )
        self.epoch, self._position, self.seed = state["epoch"], state["position"], state["seed"]
        self._begun, self._loaded = False, True
        self.loads += 1

    def _order(self) -> list[int]:
        """Return the numbers of all samples in the epoch's order."""
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order


class StepSampler(RankSampler):
    """A `RankSampler` that yields lists of sample numbers: the batches of one rank, where a step has V =
    ``virtual_ranks`` micro-batches of ``batch_size`` samples. Virtual rank v has samples v, v + V, … of the epoch's
    order. This rank's micro-batch j is that of virtual rank j * ``ranks`` + ``rank``, so each virtual rank sees the
    same samples at any number of ranks. An epoch ends with a step, which has fewer samples unless ``drop_last``. The
    position moves once per step, by all its samples. Other arguments: as for `RankSampler`."""

    def __init__(
        self, size: int, rank: int, ranks: int, virtual_ranks: int, batch_size: int, *, drop_last: bool, shuffle: bool
    ) -> None:
        super().__init__(size, rank, ranks, shuffle=shuffle)
        self.virtual_ranks = virtual_ranks
        self._batch_size, self._drop_last = batch_size, drop_last
        self._drawn_in_step = 0

    def __len__(self) -> int:
        """Return the number of batches of this rank in a full epoch."""
        samples = math.ceil(self.size / self.virtual_ranks)
        steps = samples // self._batch_size if self._drop_last else math.ceil(samples / self._batch_size)
        return steps * (self.virtual_ranks // self.ranks)

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]  # torch calls this a batch sampler
        """Yield the sample numbers of each batch of this rank, from the position on. Iterating does not move the
        position."""
        order, count = self._order(), self.virtual_ranks
        rest = order[self._position :]
        rest += islice(cycle(order), -len(rest) % count)
        for start in range(0, len(rest), self._batch_size * count):
            step = rest[start : start + self._batch_size * count]
            if self._drop_last and len(step) < self._batch_size * count:
                return
            for virtual_rank in range(self.rank, count, self.ranks):
                yield step[virtual_rank::count]

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` with the next iteration, at its start, or at the position that was loaded if it is in this
        epoch; in both cases with the first micro-batch of a step."""
        self._drawn_in_step = 0
        super().set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Move to the first batch of the step in which `state_dict` was taken. Raises `UsageError` for a data set of
        another size."""
        self._drawn_in_step = 0
        super().load_state_dict(state)

    def advance(self, per_rank: int, min_left: int) -> None:
        """Count a micro-batch of ``per_rank`` samples drawn by every rank. After a step's last one, move the position
        by all its samples; to the next epoch if fewer than ``min_left`` remain for each virtual rank."""
        self._drawn_in_step += 1
        if self._drawn_in_step == self.virtual_ranks // self.ranks:
            self._drawn_in_step = 0
            self._position += per_rank * self.virtual_ranks
            if math.ceil((self.size - self._position) / self.virtual_ranks) < min_left:
                self.set_epoch(self.epoch + 1)


class RankLoader(Generic[_Batch]):
    """Batches of this rank's samples; iterating again begins the next epoch, shuffled again. Arguments are a
    DataLoader's.

    Attributes:
        dataset, batch_size (samples per batch and rank), collate_fn: as given.
        data_sampler: a `RankSampler`, or the sampler that was given; its `set_epoch` chooses the epoch.

    The position counts the batches that were yielded, not those that workers have prepared. Loading a position ends an
    iteration that has begun: it raises `UsageError`. A user's own sampler keeps its position itself, by its
    ``state_dict`` and ``load_state_dict`` if it has them."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        sampler: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.data_sampler = sampler
        self._min_left = batch_size if drop_last else 1
        self._workers_seed = torch.Generator()
        batching: dict[str, Any] = {"batch_size": batch_size, "sampler": sampler, "drop_last": drop_last}
        if isinstance(sampler, StepSampler):
            batching = {"batch_sampler": sampler}
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            **batching,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            num_workers=workers,
            generator=self._workers_seed,
        )

    def __len__(self) -> int:
        """Return the number of batches in a full epoch of this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[_Batch]:
        """Yield the epoch's remaining batches and move the position. Raises `UsageError` if a position is loaded
        meanwhile."""
        sampler = self.data_sampler
        if not isinstance(sampler, RankSampler):
            yield from self._loader
            return
        sampler.begin()
        self._workers_seed.manual_seed(sampler.seed + sampler.epoch)  # torch's own generator is left to the model
        loads = sampler.loads
        for batch in self._loader:
            if sampler.loads != loads:
                raise UsageError(
                    "the position in the data was loaded (engine.resume, engine.load_checkpoint) while an iteration "
                    "over the loader was under way, which would continue with other batches than the checkpoint's next "
                    "ones: begin a new one after loading, with iter(loader) or a new RepeatingLoader(loader)"
                )
            sampler.advance(self.batch_size, self._min_left)
            yield batch

    def state_dict(self) -> dict[str, Any] | None:
        """Return the position of the next batch as plain data; None if the user's sampler has no ``state_dict``."""
        taken = getattr(self.data_sampler, "state_dict", None)
        return None if taken is None else {"sampler": taken()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin at the position that `state_dict` returned. Raises `UsageError` if the sampler
        has no ``load_state_dict``, or for a data set of another size."""
        load = getattr(self.data_sampler, "load_state_dict", None)
        if load is None:
            raise UsageError(
                f"the checkpoint holds a position in the data, but {type(self.data_sampler).__name__} has no "
                "load_state_dict to take it"
            )
        load(state["sampler"])


class RepeatingLoader(Generic[_Batch]):
    """Iterates over ``loader`` forever: begins a new iteration whenever one ends. Raises StopIteration if it has no
    batches."""

    def __init__(self, loader: Iterable[_Batch]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[_Batch]:
        return self

    def __next__(self) -> _Batch:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def rank_loader(
    dataset: Any,
    batch_size: int,
    *,
    rank: int,
    ranks: int,
    device: torch.device,
    shuffle: bool = True,
    sampler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    pin_memory: bool = True,
    workers: int = 0,
    virtual_ranks: int = 0,
) -> RankLoader[Any]:
    """Return a `RankLoader` for ``rank`` of ``ranks``, with ``batch_size`` samples per batch. Pins no memory on the
    CPU. ``sampler``: the user's own; by default a `RankSampler`, or a `StepSampler` if ``virtual_ranks`` is not 0.
    Raises `UsageError` for a data set that is not map-style (``__len__`` and ``__getitem__``)."""
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not sized:
        raise UsageError(
            f"training_data: expected samples by number (__len__ and __getitem__), got {type(dataset).__name__}; "
            "divide it over the ranks yourself and pass its batches to the engine"
        )
    if sampler is None and virtual_ranks:
        sampler = StepSampler(
            len(dataset), rank, ranks, virtual_ranks, batch_size, drop_last=drop_last, shuffle=shuffle
        )
    elif sampler is None:
        sampler = RankSampler(len(dataset), rank, ranks, shuffle=shuffle)
    return RankLoader(
        dataset,
        batch_size,
        sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=pin_memory and device.type != "cpu",
        workers=workers,
    )
