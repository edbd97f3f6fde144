"""A data loader whose batches are spread over the ranks of a sequence group."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from zero_comm import NO_STEP, Message, Tag

from .batches import split_batch
from .errors import SequenceError
from .groups import SequenceGroups

_TAG = Tag("exchange", "batches", NO_STEP)
Source = Literal["each", "same"]


class SequenceLoader:
    """Yields this rank's shards of the batches of ``loader``.

    ``source``: "each" where every rank's loader has batches of its own: each time all ranks of a sequence group draw
    one, these are computed one after the other, each by all ranks; so a loader of n batches on each of N ranks gives
    n*N, of which a rank holds 1/N. "same" where all ranks of a sequence group have the same loader, in the same order:
    each batch is sharded in place, and nothing is sent. ``shift``, ``pad_token_id``: see `split_batch`. ``device``:
    where shards are put; by default they stay on the CPU.

    Any iterable will do; iterating again begins it again. Iteration ends when no rank of the group has a batch left,
    with "same" when this rank has none. Batches are mappings from names (str) to tensors and plain data (JSON). What is
    wrong with a batch of one rank raises `SequenceError` on every rank of its group. ``groups``: the ranks that share
    sequences.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        groups: SequenceGroups,
        *,
        source: Source = "each",
        shift: bool = True,
        pad_token_id: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.loader = loader
        self._groups = groups
        self._source = source
        self._shift = shift
        self._pad_token_id = pad_token_id
        self._device = device

    def __len__(self) -> int:
        """Return how many shards one iteration yields on this rank.

        With "same", the length of the loader. With "each", the length times the size of the sequence group, exact if
        the loaders of all its ranks are equally long. Raises TypeError if the loader has no length.
        """
        own = len(self.loader)  # type: ignore[arg-type]
        return own * self._groups.size if self._source == "each" else own

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's shards, by name of the entry, on ``device``. With "each" every batch is collective over the
        sequence group, so all its ranks iterate to the end; with "same" nothing is sent."""
        batches = iter(self.loader)
        while True:
            batch = next(batches, None)
            shards = self._draw_each(batch) if self._source == "each" else self._draw_same(batch)
            if shards is None:
                return
            for shard in shards:
                yield {key: self._placed(value) for key, value in shard.items()}

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to the first of the loader, its sampler and its dataset that has `set_epoch`; do nothing if
        none has."""
        for target in (self.loader, getattr(self.loader, "sampler", None), getattr(self.loader, "dataset", None)):
            take = getattr(target, "set_epoch", None)
            if take is not None:
                take(epoch)
                return

    def _split(self, batch: Any) -> list[dict[str, Any]]:
        """Return the shards of ``batch``, one for each rank of the sequence group. Raises `SequenceError` if it is no
        mapping, for a key that is no str, and as `split_batch` does."""
        if not isinstance(batch, Mapping):
            raise SequenceError(f"expected batches that are mappings of tensors by name, got {type(batch).__name__}")
        other = next((key for key in batch if not isinstance(key, str)), None)
        if other is not None:
            raise SequenceError(f"expected batches whose keys are names (str), got {type(other).__name__} {other!r}")
        return split_batch(batch, self._groups.size, shift=self._shift, pad_token_id=self._pad_token_id)

    def _draw_same(self, batch: Any) -> list[dict[str, Any]] | None:
        """Return this rank's shard, in a list, of a batch that all ranks of the group have; None without a batch. Sends
        nothing."""
        return None if batch is None else [self._split(batch)[self._groups.rank]]

    def _draw_each(self, batch: Any) -> list[dict[str, Any]] | None:
        """Exchange the shards of the ranks' batches; return this rank's, in the order of the ranks they came from.
        ``batch``: None if this rank has none left; returns None once no rank has one. Collective. Raises
        `SequenceError` on every rank for a batch that does not fit."""
        try:
            mine = [] if batch is None else self._split(batch)
            said: Any = None if batch is None else _header(mine[0])
        except SequenceError as error:
            said = str(error)
        told = self._groups.control.agree(Message("data", "batch", NO_STEP, said))
        for rank, theirs in enumerate(told):
            if isinstance(theirs, str):
                raise SequenceError(f"the batch of rank {rank} of the sequence group: {theirs}")
        if all(theirs is None for theirs in told):
            return None
        return self._exchange(mine, told)

    def _exchange(self, mine: list[dict[str, Any]], told: list[Any]) -> list[dict[str, Any]]:
        """Send shard r of this rank's batch, ``mine``, to rank r, and return the shards that arrived, by rank.
        ``told``: each rank's header (see `_header`), None for no batch. Collective."""
        size = max(sum(_bytes(entry) for entry in theirs["tensors"]) for theirs in told if theirs is not None)
        sent = torch.zeros(self._groups.size, size, dtype=torch.uint8)
        for row, shard in zip(sent, mine, strict=False):
            _write(row, [value for value in shard.values() if isinstance(value, torch.Tensor)])
        arrived = torch.empty_like(sent)
        self._groups.batches.all_to_all(arrived, sent, _TAG).wait()
        return [_read(row, theirs) for row, theirs in zip(arrived, told, strict=True) if theirs is not None]

    def _placed(self, value: Any) -> Any:
        """Return a tensor on the loader's device, if it has one; other values as they are."""
        return value.to(self._device) if self._device is not None and isinstance(value, torch.Tensor) else value


def _header(shard: dict[str, Any]) -> dict[str, Any]:
    """Return names, dtypes and shapes of the tensors of a shard, its plain data, and the order of all keys. Raises
    `SequenceError` for a value that is neither a tensor nor JSON."""
    tensors = [
        [key, str(value.dtype).removeprefix("torch."), list(value.shape)]
        for key, value in shard.items()
        if isinstance(value, torch.Tensor)
    ]
    plain = {key: value for key, value in shard.items() if not isinstance(value, torch.Tensor)}
    for key, value in plain.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise SequenceError(
                f"{key!r}: expected a tensor or plain data (numbers, text, lists and maps of these), got "
                f"{type(value).__name__}"
            ) from error
    return {"tensors": tensors, "plain": plain, "order": list(shard)}


def _bytes(entry: list[Any]) -> int:
    """Return the bytes of the tensor that a header's ``entry`` describes."""
    _, dtype, shape = entry
    return int(torch.Size(shape).numel()) * int(getattr(torch, dtype).itemsize)


def _write(row: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Write the bytes of ``tensors``, one after the other, to ``row`` (1-D, uint8), which is long enough."""
    start = 0
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        row[start : start + flat.nbytes] = flat.view(torch.uint8)
        start += flat.nbytes


def _read(row: torch.Tensor, header: dict[str, Any]) -> dict[str, Any]:
    """Return the shard that ``header`` (from `_header`) describes, from the bytes in ``row`` (1-D, uint8); its tensors
    are copies."""
    found, start = dict(header["plain"]), 0
    for entry in header["tensors"]:
        name, dtype, shape = entry
        end = start + _bytes(entry)
        found[name] = row[start:end].clone().view(getattr(torch, dtype)).view(shape)
        start = end
    return {key: found[key] for key in header["order"]}
