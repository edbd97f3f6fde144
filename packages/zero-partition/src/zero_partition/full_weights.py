"""Full weights in bounded buckets, for a program that computes with them: one unit is gathered at a time.

A pass, here, is one iteration over all weights. A bucket is some of them, one behind the other in a piece of memory.
What iterates is the receiver of the weights.

[Note: a rank that stops] Ranks meet after each bucket, the last one too. A loop that ends early closes its iterator,
which takes part in the next meeting and says there that it has stopped, with the exception that was thrown into it. If
all ranks stop at the same bucket, nothing else happens; otherwise those that went on raise, and no rank waits. A rank
that calls something else of the engine while its iterator is open meets the others with another message, which they all
raise as a `DesyncError`. A step and a further pass end the open one on every rank (`WeightPasses`): its units are
released, and it meets nobody any more.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zero_comm import WeightBucket, WeightInfo, bucket_offsets, bucket_views, describe_weights, plan_buckets

from .adapters import (
    NamedWeight,
    adapter_state,
    base_buffers,
    base_weights,
    merged_values,
    plain_buffers,
    plain_weights,
)
from .errors import PartitionError
from .gathered_blocks import gathered
from .partition import Partition
from .weight_passes import WeightPass

BUCKET_BYTES = 1 << 26
"""The default bound of a bucket, in bytes: 64 MiB."""
_KIND = "full weights"
_NEXT, _STOPPED = "next", "stopped"
_TOLD = 1000
"""Characters of a reason that other ranks are told."""


@dataclass(frozen=True)
class _Entry:
    """One value of a pass. ``info``: its name, dtype and shape as handed on. ``tensor``: the parameter or buffer of the
    model. ``merged``: the weight with adapters to merge into it, None without. ``units``: the indices of the units to
    gather before it is read."""

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
    adapters cannot be merged. ``partition``: the sharded ``model``; its passes gather, so they are collective.
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
        rank iterates with the same arguments, to the end or to the same bucket. When one rank stops earlier, the others
        raise `PartitionError`, and that rank warns. Raises `PartitionError` at once for a bound below 1; while
        iterating, inside a forward or backward pass, when ranks have other weights, and when weights have changed
        between two buckets: by a step, `set_full_parameter`, `gathered` with a modifier rank, or a checkpoint.
        """
        return self._checked(bucket_bytes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the value of each weight, as a tensor of its own that stays valid. Collective, as
        `buckets`."""
        buckets = self._checked(BUCKET_BYTES)
        for bucket in buckets:
            for name, tensor in bucket:
                try:
                    copy = tensor.clone()
                except BaseException as failure:
                    buckets.throw(failure)
                    raise
                yield name, copy

    def _checked(self, bucket_bytes: int) -> Generator[WeightBucket, None, None]:
        """Return the buckets of a new pass, of at most ``bucket_bytes`` each; the pass begins when the first is asked
        for. Raises `PartitionError` at once for a bound below 1, and what ``check`` raises."""
        self._check()
        if bucket_bytes < 1:
            raise PartitionError(f"full weights: bucket_bytes must be at least 1, got {bucket_bytes}")
        return self._pass(bucket_bytes)

    def _pass(self, bucket_bytes: int) -> Generator[WeightBucket, None, None]:
        """Yield the buckets of one pass, of at most ``bucket_bytes`` each, and meet the other ranks after each (see
        [Note: a rank that stops]). Collective. Raises as `buckets` says."""
        runtime = self._partition.runtime
        runtime.reopen("iter_full_weights")
        if runtime.gathers.active:
            raise PartitionError("full weights were asked for inside a forward or backward pass; ask before or after")
        entries, plan, memory = self._begin(bucket_bytes)
        given, adapters = 0, _digest(adapter_state(self._model))
        with _Gathers(self._partition, entries) as gathers, runtime.weight_passes.opened(gathers.close) as opened:
            for number, infos in enumerate(plan):
                first, given = given, given + len(infos)
                plain = WeightBucket(number, len(plan), infos, memory[: bucket_offsets(infos)[1]])
                bucket = replace(plain, stop=partial(self._end_by_failure, opened, plain))
                try:
                    self._fill(bucket, entries[first:given], gathers)
                except BaseException as failure:
                    runtime.failed_in("iter_full_weights", failure, awaited=True)
                    raise
                try:
                    yield bucket
                except GeneratorExit:
                    self._stop(opened, bucket, "")
                    raise
                except BaseException as failure:
                    self._end_by_failure(opened, bucket, failure)
                    raise
                self._meet(opened, bucket, adapters)

    def _begin(self, bucket_bytes: int) -> tuple[list[_Entry], list[tuple[WeightInfo, ...]], torch.Tensor]:
        """Prepare a pass in buckets of at most ``bucket_bytes``, have the ranks compare it, and wait for updates that
        still run. Return (all entries, their descriptions by bucket, uint8 memory for the largest bucket). Collective.
        Raises `PartitionError` if the ranks have other weights, or one cannot begin."""
        entries: list[_Entry] = []
        plan: list[tuple[WeightInfo, ...]] = []
        memory, failure = torch.empty(0, dtype=torch.uint8), None
        try:
            entries = self._entries()
            plan = plan_buckets([entry.info for entry in entries], bucket_bytes)
            size = max((bucket_offsets(infos)[1] for infos in plan), default=0)
            memory = torch.empty(size, dtype=torch.uint8, device=self._partition.device)
        except Exception as error:
            failure = error
        digest = _digest([describe_weights([entry.info for entry in entries]), adapter_state(self._model)])
        problem = "" if failure is None else f"{type(failure).__name__}: {failure}"[:_TOLD]
        told = self._partition.runtime.agree(
            _KIND, f"in buckets of {bucket_bytes} bytes", [digest, len(entries), problem]
        )
        if failure is not None:
            raise failure
        for rank, (_, _, reason) in enumerate(told):
            if reason:
                raise PartitionError(f"full weights: rank {rank} cannot begin: {reason}. The engine is as before.")
        apart = next((rank for rank, other in enumerate(told) if other != told[0]), None)
        if apart is not None:
            raise PartitionError(
                f"full weights: rank {apart} has other weights than rank 0 ({told[apart][1]} and {told[0][1]}): other "
                "names, dtypes or shapes, or other active adapters. Pass the same arguments, and switch adapters, on "
                "every rank."
            )
        try:
            self._partition.finish_updates()
        except BaseException as failed:
            self._partition.runtime.failed_in("iter_full_weights", failed, awaited=True)
            raise
        return entries, plan, memory

    def _meet(self, opened: WeightPass, bucket: WeightBucket, adapters: str) -> None:
        """Meet the other ranks after ``bucket`` of the pass ``opened``. ``adapters``: digest of the adapters' state at
        the beginning of the pass. Collective, unless something has ended the pass.

        Raises `PartitionError` if a rank has stopped, if something has ended the pass, and if adapters on a rank are in
        another state now, unless it was the last bucket.
        """
        done = f"after bucket {bucket.number + 1} of {bucket.count}"
        if opened.ended:
            raise PartitionError(f"full weights: {opened.ended} {done}, which ends the pass. Iterate to the end first.")
        told = self._partition.runtime.agree(_KIND, _meeting_name(bucket), [_NEXT, _digest(adapter_state(self._model))])
        stopped = next((rank for rank, (word, _) in enumerate(told) if word != _NEXT), None)
        if stopped is not None:
            raise PartitionError(
                f"full weights: rank {stopped} stopped iterating {done} and this rank went on{told[stopped][1]}. Every "
                "rank has to iterate to the end, or to stop at the same bucket. The engine is as before."
            )
        switched = next((rank for rank, (_, now) in enumerate(told) if now != adapters), None)
        if switched is not None and bucket.number < bucket.count - 1:
            raise PartitionError(
                f"full weights: adapters were switched or merged on rank {switched} {done}: the buckets would have "
                "weights of two models. Switch adapters before the pass or after it, on every rank."
            )

    def _stop(self, opened: WeightPass, bucket: WeightBucket, reason: str) -> None:
        """Tell the other ranks that this one has stopped after ``bucket`` of the pass ``opened``, with the ``reason``
        (empty for none); warn if they went on. Collective; does nothing if the pass or the engine has ended or a
        forward or backward pass runs."""
        runtime = self._partition.runtime
        if opened.ended or runtime.failed or runtime.gathers.active:
            return
        told = runtime.agree(_KIND, _meeting_name(bucket), [_STOPPED, reason[:_TOLD]])
        if any(word == _NEXT for word, _ in told):
            warnings.warn(
                f"this rank stopped iterating full weights after bucket {bucket.number + 1} of {bucket.count}, and "
                "other ranks went on; they raise PartitionError",
                stacklevel=2,
            )

    def _end_by_failure(self, opened: WeightPass, bucket: WeightBucket, failure: BaseException) -> None:
        """Tell the other ranks, as `_stop` does, that the receiver of ``bucket`` has failed with ``failure``, and end
        the pass ``opened``: its units are released also where something still holds the iterator. Does nothing after
        the pass has ended."""
        self._stop(opened, bucket, f": {type(failure).__name__}: {failure}")
        if not opened.ended:
            opened.ended = f"what took the weights failed ({type(failure).__name__})"
            opened.release()

    def _fill(self, bucket: WeightBucket, entries: Sequence[_Entry], gathers: _Gathers) -> None:
        """Write the values of ``entries`` into ``bucket``, which is for them. ``gathers``: gathers the units that they
        need and releases those that no later entry needs, which is collective."""
        for entry, view in zip(entries, bucket_views(bucket.infos, bucket.memory), strict=True):
            gathers.acquire(entry.units)
            with torch.no_grad():
                view.copy_(entry.tensor.detach() if entry.merged is None else gathers.merged(entry.merged))
            gathers.release_unneeded()

    def _entries(self) -> list[_Entry]:
        """Return the entries in the order of a pass: replicated parameters, those of units by unit, then, if asked for,
        the persistent buffers. Raises as `base_weights` does."""
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
        """Return the entry of ``weight``: in the ``dtype`` of the class if that is given and the weight is
        floating-point; its units are those of its own values and of the adapters to merge."""
        parameter = weight.parameter
        converts = self._dtype is not None and parameter.dtype.is_floating_point
        info = WeightInfo(weight.name, self._dtype if converts else parameter.dtype, tuple(parameter.shape))  # type: ignore[arg-type]
        sources = weight.sources if weight.layers else [parameter]
        units = sorted({self._unit_of(source) for source in sources} - {-1})
        return _Entry(info, parameter, weight if weight.layers else None, tuple(units))

    def _unit_of(self, parameter: nn.Parameter) -> int:
        """Return the index of the unit that holds ``parameter``; -1 if no unit does, so that every rank has all of
        it."""
        found = self._partition.find(parameter)
        return -1 if found is None else found[0].index


class _Gathers:
    """Gathers the units of ``partition`` that a pass's ``entries`` (all, in order) need, each once, until the last
    entry that needs it is written; a context manager."""

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
        """Return ``weight`` with its adapters merged, as a new tensor. Its units and its adapters' must be gathered.
        Other weights of its module that were merged with it are kept for the next call, until that is for another
        module."""
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
        """Call `close`."""
        self.close()

    def close(self) -> None:
        """Release every unit that this object still keeps gathered. Does nothing if there is none."""
        self._merged = (None, {})
        for index in list(self._open):
            self._open.pop(index).__exit__(None, None, None)


def _digest(described: Any) -> str:
    """Return a digest of ``described``, plain data, as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def _meeting_name(bucket: WeightBucket) -> str:
    """Return the name of the meeting of the ranks after ``bucket``: "bucket 1 of 3"."""
    return f"bucket {bucket.number + 1} of {bucket.count}"
