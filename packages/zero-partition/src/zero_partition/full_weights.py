"""Full weights in bounded buckets, for a program that computes with them: one unit is gathered at a time.

[Note: a rank that stops] Ranks meet before each bucket but the first. A loop that ends early closes its iterator, which
takes part in the next meeting and says there that it has stopped. If all ranks stop at the same bucket, nothing else
happens; otherwise those that went on raise, and no rank waits. A rank that calls something else of the engine while its
iterator is open meets the others with another message, which they all raise as a `DesyncError`.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zero_comm import WeightBucket, WeightInfo, bucket_offsets, bucket_views, describe_weights, plan_buckets

from .access import gathered
from .adapters import NamedWeight, base_buffers, base_weights, merged_values, plain_buffers, plain_weights
from .errors import PartitionError
from .partition import Partition

BUCKET_BYTES = 1 << 26
"""The default bound of a bucket, in bytes: 64 MiB."""
_KIND = "full weights"


@dataclass(frozen=True)
class _Entry:
    """One value of a pass: its description, its tensor in the model, the weight with adapters to merge into it (None
    without), and the indices of the units to gather before it is read."""

    info: WeightInfo
    tensor: torch.Tensor
    merged: NamedWeight | None
    units: tuple[int, ...]


class FullWeights:
    """The full weights of a sharded model, for a program that computes with them (an inference server).

    ``dtype``: of floating-point parameters; None keeps each one's own. ``buffers``: add the persistent buffers, in
    their own dtypes. ``merge_adapters``: weights have the base model's names, with active adapters merged by PEFT's own
    arithmetic, in copies; else every parameter is handed on under its own name. ``check``: called at the start of each
    pass and of `metadata`; it raises if the model cannot be read.

    Tied parameters come once, under their first name. Units come in the model's order, replicated parameters first.
    With `metadata` and iteration it is what vLLM calls a weight source.

    Raises `PartitionError` if ``dtype`` is no floating-point dtype, and from every method as `base_weights` does where
    adapters cannot be merged.
    """

    def __init__(
        self,
        partition: Partition,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        buffers: bool = False,
        merge_adapters: bool = True,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._partition = partition
        self._model = model
        self._dtype = dtype
        self._buffers = buffers
        self._merge_adapters = merge_adapters
        self._check = check
        if dtype is not None and not dtype.is_floating_point:
            raise PartitionError(f"full weights: dtype must be a floating-point dtype or None, got {dtype}")

    def metadata(self) -> list[WeightInfo]:
        """Return the name, dtype and shape of every weight, in the order of a pass. Gathers nothing and does not
        communicate."""
        self._check()
        return [entry.info for entry in self._entries()]

    def buckets(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[WeightBucket]:
        """Return an iterator over all weights, in buckets of at most ``bucket_bytes``; a larger weight has its own.

        Each unit is gathered once, and is released before the next one is. A bucket's tensors are valid until the next
        one is asked for: all buckets of a pass are in one piece of memory. Memory: the largest bucket and the largest
        unit; with adapters also the units of the adapters under way, a weight's copy and its change. Collective: every
        rank iterates with the same arguments, to the end or to the same bucket. When one stops earlier, the others
        raise `PartitionError` and it warns. Raises `PartitionError` at once for a bound below 1; while iterating,
        inside a forward or backward pass, when ranks have other weights, and when the optimizer has stepped between two
        buckets.
        """
        self._check()
        if bucket_bytes < 1:
            raise PartitionError(f"full weights: bucket_bytes must be at least 1, got {bucket_bytes}")
        return self._pass(bucket_bytes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the value of each weight, as a tensor of its own that stays valid. Collective, as
        `buckets`."""
        for bucket in self.buckets():
            for name, tensor in bucket:
                yield name, tensor.clone()

    def _pass(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        """Yield the buckets of one pass, each in the same memory, which is allocated at the first; see [Note: a rank
        that stops]. Collective. Raises as `buckets` says."""
        runtime = self._partition.runtime
        runtime.reopen("iter_full_weights")
        if runtime.gathers.active:
            raise PartitionError("full weights were asked for inside a forward or backward pass; ask before or after")
        entries = self._entries()
        plan = plan_buckets([entry.info for entry in entries], bucket_bytes)
        self._begin(entries, bucket_bytes)
        size = max((bucket_offsets(infos)[1] for infos in plan), default=0)
        memory = torch.empty(size, dtype=torch.uint8, device=self._partition.device)
        step, given = runtime.step, 0
        try:
            with _Gathers(self._partition, entries) as gathers:
                for number, infos in enumerate(plan):
                    if number:
                        self._meet(number, len(plan), step)
                    first, given = given, given + len(infos)
                    bucket = WeightBucket(number, len(plan), infos, memory[: bucket_offsets(infos)[1]])
                    try:
                        self._fill(bucket, entries[first:given], gathers)
                    except BaseException as failure:
                        runtime.failed_in("iter_full_weights", failure, awaited=True)
                        raise
                    yield bucket
        except GeneratorExit:
            if given < len(entries):
                self._stop(bucket.number + 1, len(plan))

    def _begin(self, entries: Sequence[_Entry], bucket_bytes: int) -> None:
        """Meet the other ranks, and finish updates that still run. Raises `PartitionError` if the ranks have other
        weights. Collective."""
        described = json.dumps(describe_weights([entry.info for entry in entries]))
        digest = hashlib.sha256(described.encode()).hexdigest()[:16]
        told = self._partition.runtime.agree(_KIND, f"in buckets of {bucket_bytes} bytes", [digest, len(entries)])
        apart = next((rank for rank, other in enumerate(told) if other != told[0]), None)
        if apart is not None:
            raise PartitionError(
                f"full weights: rank {apart} has other weights than rank 0 ({told[apart][1]} and {told[0][1]}): other "
                "names, dtypes or shapes. Pass the same arguments and switch adapters on every rank."
            )
        self._partition.finish_updates()

    def _meet(self, number: int, count: int, step: int) -> None:
        """Meet the other ranks before bucket ``number`` of ``count``. Raises `PartitionError` if one has stopped, or if
        the training loop has moved on from ``step``. Collective."""
        runtime = self._partition.runtime
        stopped = [rank for rank, word in enumerate(runtime.agree(_KIND, f"bucket {number}", "next")) if word != "next"]
        if stopped:
            raise PartitionError(
                f"full weights: rank {stopped[0]} stopped iterating after bucket {number} of {count} and this rank "
                "went on. Every rank has to iterate to the end, or to stop at the same bucket. The engine is as before."
            )
        if runtime.step != step:
            raise PartitionError(
                f"full weights: the optimizer has stepped after bucket {number} of {count}: the buckets would have "
                "weights of two steps. Iterate to the end, then step."
            )

    def _stop(self, number: int, count: int) -> None:
        """Tell the other ranks that this one has stopped before bucket ``number`` of ``count``, and warn if they went
        on to it. Collective, unless a failure has ended the engine."""
        runtime = self._partition.runtime
        if not runtime.failed and "next" in runtime.agree(_KIND, f"bucket {number}", "stopped"):
            warnings.warn(
                f"this rank stopped iterating full weights after bucket {number} of {count}, and other ranks went on; "
                "they raise PartitionError",
                stacklevel=2,
            )

    def _fill(self, bucket: WeightBucket, entries: Sequence[_Entry], gathers: _Gathers) -> None:
        """Write the values of ``entries`` into ``bucket``. Gathers what they need and releases what no later one
        needs; collective then."""
        for entry, view in zip(entries, bucket_views(bucket.infos, bucket.memory), strict=True):
            gathers.acquire(entry.units)
            with torch.no_grad():
                view.copy_(entry.tensor.detach() if entry.merged is None else gathers.merged(entry.merged))
            gathers.release_unneeded()

    def _entries(self) -> list[_Entry]:
        """Return the entries in the order of a pass: replicated parameters, those of units by unit, then the buffers if
        they were asked for."""
        weights = base_weights(self._model) if self._merge_adapters else plain_weights(self._model)
        placed = [(self._unit_of(weight.parameter), weight) for weight in weights]
        placed.sort(key=lambda one: one[0])
        entries = [self._entry(weight) for _, weight in placed]
        if self._buffers:
            named = base_buffers(self._model) if self._merge_adapters else plain_buffers(self._model)
            found = {id(buffer): (name, buffer) for name, buffer in reversed(list(named))}
            for name, buffer in reversed(list(found.values())):
                entries.append(_Entry(WeightInfo(name, buffer.dtype, tuple(buffer.shape)), buffer, None, ()))
        return entries

    def _entry(self, weight: NamedWeight) -> _Entry:
        """Return the entry of ``weight``: its dtype is the one asked for if it is a floating-point weight, and its
        units are those of its own values and of the adapters to merge."""
        parameter = weight.parameter
        converts = self._dtype is not None and parameter.dtype.is_floating_point
        info = WeightInfo(weight.name, self._dtype if converts else parameter.dtype, tuple(parameter.shape))  # type: ignore[arg-type]
        sources = weight.sources if weight.layers else [parameter]
        units = sorted({self._unit_of(source) for source in sources} - {-1})
        return _Entry(info, parameter, weight if weight.layers else None, tuple(units))

    def _unit_of(self, parameter: nn.Parameter) -> int:
        """Return the index of the unit that holds ``parameter``; -1 if every rank has all of it."""
        found = self._partition.find(parameter)
        return -1 if found is None else found[0].index


class _Gathers:
    """Gathers the units that entries need, each once, until the last of them is written; a context manager.

    ``entries``: all of the pass, in order.
    """

    def __init__(self, partition: Partition, entries: Sequence[_Entry]) -> None:
        self._partition = partition
        self._last = {unit: number for number, entry in enumerate(entries) for unit in entry.units}
        self._open: dict[int, AbstractContextManager[Any]] = {}
        self._done = 0
        self._merged: tuple[nn.Module | None, dict[str, torch.Tensor]] = (None, {})

    def acquire(self, units: Sequence[int]) -> None:
        """Gather those of ``units`` (indices) that are released. Collective."""
        for index in units:
            unit = self._partition.units[index]
            if unit.releasable and index not in self._open:
                context = gathered(self._partition, unit.parameters[:1], read_only=True)
                context.__enter__()
                self._open[index] = context

    def merged(self, weight: NamedWeight) -> torch.Tensor:
        """Return ``weight`` with its adapters merged, as a new tensor. The units involved are gathered. Values of its
        owner that were merged with it are kept for the next call, and forgotten if that is for another owner."""
        owner, values = self._merged
        if owner is not weight.owner or weight.key not in values:
            self._merged = (None, {})
            values = merged_values(weight)
        value = values.pop(weight.key)
        self._merged = (weight.owner, values)
        return value

    def release_unneeded(self) -> None:
        """Count one more entry as written, and release the units that no later entry needs."""
        for index in [unit for unit in self._open if self._last[unit] <= self._done]:
            self._open.pop(index).__exit__(None, None, None)
        self._done += 1

    def __enter__(self) -> _Gathers:
        """Return this object; nothing is gathered yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release every unit that is gathered still."""
        self._merged = (None, {})
        for index in list(self._open):
            self._open.pop(index).__exit__(None, None, None)
