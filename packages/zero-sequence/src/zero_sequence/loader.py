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
    """Yields this rank's shards of the batches of ``loader``, any iterable, which each iteration begins again.

    ``groups``: the ranks that share sequences. ``source``: "each" if every rank's loader has batches of its own. Then
    each rank of a sequence group draws a batch, and the shards of all of them are exchanged; so loaders of n batches on
    each of N ranks yield n * N shards on every rank. "same" if all ranks of a sequence group have the same loader, in
    the same order: then each rank keeps its shard of each batch, and nothing is sent. ``shift``: move labels by one
    place before the sequence is sharded, as causal models need. ``pad_token_id``: the token that fills up lengths which
    the ranks do not divide; None to refuse these. ``device``: where shards are put; by default they stay on the CPU.

    Iteration ends when no rank of the group has a batch left, with "same" when this rank has none. Batches are mappings
    from names (str) to tensors and plain data (JSON). If a batch of one rank does not fit, every rank of its group
    raises `SequenceError`.
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
                yield {key: self._on_device(value) for key, value in shard.items()}

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to the first of the loader, its sampler and its dataset that has `set_epoch`; do nothing if
        none has."""
        for target in (self.loader, getattr(self.loader, "sampler", None), getattr(self.loader, "dataset", None)):
            take = getattr(target, "set_epoch", None)
            if take is not None:
                take(epoch)
                return

    def _split_checked(self, batch: Any) -> list[dict[str, Any]]:
        """Return the shards of ``batch``, one for each rank of the sequence group, by `split_batch`. Raises
        `SequenceError` as that does, and for a batch that is no mapping or has a key that is no str."""
        if not isinstance(batch, Mapping):
            raise SequenceError(f"expected batches that are mappings of tensors by name, got {type(batch).__name__}")
        other = next((key for key in batch if not isinstance(key, str)), None)
        if other is not None:
            raise SequenceError(f"expected batches whose keys are names (str), got {type(other).__name__} {other!r}")
        return split_batch(batch, self._groups.size, shift=self._shift, pad_token_id=self._pad_token_id)

    def _draw_same(self, batch: Any) -> list[dict[str, Any]] | None:
        """Return [this rank's shard of ``batch``], which all ranks of the group have; None for None, the end of the
        loader. Sends nothing."""
        return None if batch is None else [self._split_checked(batch)[self._groups.rank]]

    def _draw_each(self, batch: Any) -> list[dict[str, Any]] | None:
        """Exchange the shards of the batches that the ranks of the group have drawn, and return this rank's shard of
        each, by the rank of the batch; None once no rank has a batch.

        ``batch``: this rank's; None if it has none left. Raises `SequenceError` on every rank if one has a batch that
        does not fit. Collective.
        """
        try:
            mine = [] if batch is None else self._split_checked(batch)
            said: Any = None if batch is None else _shard_header(mine[0])
        except SequenceError as error:
            said = str(error)
        told = self._groups.control.agree(Message("data", "batch", NO_STEP, said))
        for rank, theirs in enumerate(told):
            if isinstance(theirs, str):
                raise SequenceError(f"the batch of rank {rank} of the sequence group: {theirs}")
        if all(theirs is None for theirs in told):
            return None
        return self._exchange_shards(mine, told)

    def _exchange_shards(self, mine: list[dict[str, Any]], told: list[Any]) -> list[dict[str, Any]]:
        """Send shard r of ``mine``, the shards of this rank's batch, to rank r, and return the shards that arrived, by
        the rank of their batch. ``mine`` is empty without a batch. ``told``: each rank's `_shard_header`, None for a
        rank without a batch. Collective."""
        size = max(sum(_nbytes(entry) for entry in theirs["tensors"]) for theirs in told if theirs is not None)
        sent = torch.zeros(self._groups.size, size, dtype=torch.uint8)
        for row, shard in zip(sent, mine, strict=False):
            _write_tensors(row, [value for value in shard.values() if isinstance(value, torch.Tensor)])
        arrived = torch.empty_like(sent)
        self._groups.batches.all_to_all(arrived, sent, _TAG).wait()
        return [_read_shard(row, theirs) for row, theirs in zip(arrived, told, strict=True) if theirs is not None]

    def _on_device(self, value: Any) -> Any:
        """Return ``value`` moved to ``device`` if it is a tensor and a device was given; else ``value`` itself."""
        return value.to(self._device) if self._device is not None and isinstance(value, torch.Tensor) else value


def _shard_header(shard: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a shard as plain data: `tensors`, a list of [name, dtype as text, shape]; `plain`, the
    other entries; and `order`, all keys in order. Raises `SequenceError` for a value that is neither a tensor nor
    JSON."""
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


def _nbytes(entry: list[Any]) -> int:
    """Return the number of bytes of the tensor that ``entry``, one of `tensors` in a header, describes."""
    _, dtype, shape = entry
    return int(torch.Size(shape).numel()) * int(getattr(torch, dtype).itemsize)


def _write_tensors(row: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Write the bytes of ``tensors``, one after the other, to the beginning of ``row`` (1-D, uint8, on the CPU), in
    place."""
    start = 0
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        row[start : start + flat.nbytes] = flat.view(torch.uint8)
        start += flat.nbytes


def _read_shard(row: torch.Tensor, header: dict[str, Any]) -> dict[str, Any]:
    """Return the shard that ``header`` (from `_shard_header`) describes, from the bytes in ``row`` (1-D, uint8); its
    tensors are copies."""
    found, start = dict(header["plain"]), 0
    for entry in header["tensors"]:
        name, dtype, shape = entry
        end = start + _nbytes(entry)
        found[name] = row[start:end].clone().view(getattr(torch, dtype)).view(shape)
        start = end
    return {key: found[key] for key in header["order"]}
