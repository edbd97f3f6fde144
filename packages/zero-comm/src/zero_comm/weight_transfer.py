"""Send full weights from a trainer to the ranks of an inference server, by the calls of vLLM's weight transfer.

[Note: an update] The trainer drives the server by four calls, which vLLM names. ``init_weight_transfer_engine`` makes
both join one process group: the trainer is rank 0, the server's ranks follow from ``rank_offset``. An update is
``start_weight_update``, then ``update_weights`` for each bucket, then ``finish_weight_update``. The bytes of a bucket
travel over the process group while ``update_weights`` runs. Ranks that want all weights get each bucket by one
broadcast; if any rank wants slices, each rank is sent what it wants, in one message per bucket, and nothing else.

[Note: the trainer's ranks] All ranks of the trainer iterate over the buckets and meet before the next one and after the
last. So everything that can fail on the sender alone comes between its first bucket and that last meeting: connecting,
``start_weight_update`` and ``finish_weight_update`` too. What fails there is thrown into the iterator, if it is a
generator, and given to the ``stop`` of the last bucket, which reaches the engine through any wrapper (``map``, a
progress bar): the others are told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from .errors import CommError, PeerError
from .transfer_group import TransferGroup, are_here, open_transfer_store
from .weight_server import ServerCall, WeightServer
from .weights import (
    Needs,
    WeightBucket,
    WeightInfo,
    bucket_offsets,
    bucket_views,
    describe_weights,
    read_weights,
)

_TIMEOUT = timedelta(minutes=5)
_LOOK_SECONDS = 0.02
"""How often the sender looks whether the server's ranks have come."""


class WeightSender:
    """Sends buckets of full weights to the ranks of a server; see [Note: an update] and [Note: the trainer's ranks].

    ``server``: the calls that drive it. ``ranks``: of the server. ``is_sender``: whether this rank of the trainer
    sends, which exactly one does; the others only iterate, so that the buckets can be gathered. ``address``: of this
    host, where the server's ranks reach it; ``port``: 0 takes a free one. ``device``: of the buckets. ``timeout``: of
    each wait for the server: for its ranks, for each call's answer and for each transfer. Nothing is connected before
    the first `send`.
    """

    def __init__(
        self,
        server: WeightServer,
        *,
        ranks: int,
        is_sender: bool = True,
        address: str = "127.0.0.1",
        port: int = 0,
        device: torch.device | str = "cpu",
        timeout: timedelta = _TIMEOUT,
    ) -> None:
        self._server = server
        self._ranks = ranks
        self._is_sender = is_sender
        self._address = (address, port)
        self._device = torch.device(device)
        self._timeout = timeout
        self._group: TransferGroup | None = None
        self._needs: list[Needs | None] = []
        self._broadcasts = True

    def send(self, buckets: Iterable[WeightBucket]) -> None:
        """Send all ``buckets`` (`Engine.iter_full_weights`) as one update. Every rank of the trainer calls it.

        Connects to the server if that is not done. Raises on the sender: OSError when it cannot listen at its address,
        `PeerError` when the server fails, refuses, or does not answer in time or its ranks do not come, ValueError when
        a rank of the server wants a slice that a weight does not have, and what ``server`` itself raises. Whoever
        yields ``buckets`` is told (see [Note: the trainer's ranks]), so the trainer's other ranks raise too, with the
        reason. The next call connects again.
        """
        passing = iter(buckets)
        last: list[WeightBucket] = []
        try:
            if self._is_sender:
                self._update(_remember_last(passing, last))
            else:
                for _ in passing:
                    pass
        except BaseException as failure:
            self.close(abort=True)
            _pass_on_failure(passing, last, failure)
            raise

    def close(self, *, abort: bool = False) -> None:
        """Leave the process group with the server's ranks; a later `send` connects again. ``abort``: also cut transfers
        that the server waits in. Does nothing if no group is open."""
        group, self._group = self._group, None
        if group is not None:
            if abort:
                group.abort()
            group.close()

    def _update(self, buckets: Iterable[WeightBucket]) -> None:
        """Send ``buckets`` as one update, each while the server's ranks receive it; only on the sender. Raises as
        `send` does. See [Note: the trainer's ranks]."""
        begun = finished = False
        for bucket in buckets:
            group = self._connected()
            if not begun:
                self._ask("start_weight_update", self._server.start_weight_update).result()
                begun = True
            asked = self._ask(
                "update_weights", self._server.update_weights, describe_weights(bucket.infos), failed=group.abort
            )
            try:
                self._send(group, bucket)
            except PeerError:
                group.abort()
                asked.result()  # the server's own reason, if it has one
                raise
            asked.result()
            if bucket.number == bucket.count - 1:
                self._ask("finish_weight_update", self._server.finish_weight_update).result()
                finished = True
        if not begun:
            self._connected()
            self._ask("start_weight_update", self._server.start_weight_update).result()
        if not finished:
            self._ask("finish_weight_update", self._server.finish_weight_update).result()

    def _connected(self) -> TransferGroup:
        """Return the process group with the server's ranks. At the first call open it, learn which weights each rank
        wants, and tell the ranks how buckets will come. Raises as `send` does."""
        if self._group is None:
            self._group = self._connect(*self._address)
            self._needs = self._group.hear_needs()
            self._broadcasts = all(needs is None for needs in self._needs)
            self._group.tell_way(broadcasts=self._broadcasts)
        return self._group

    def _connect(self, address: str, port: int) -> TransferGroup:
        """Listen on ``address`` and ``port``, have the server's ranks connect there, and return the process group with
        them. Raises `PeerError` when they do not come in time, OSError when this host cannot listen there, and what the
        server's call raises."""
        store, port = open_transfer_store(address, port, self._timeout)
        world_size = 1 + self._ranks
        told = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        begin = time.monotonic()
        asked = self._ask("init_weight_transfer_engine", self._server.init_weight_transfer_engine, told)
        while not are_here(store, world_size):
            if asked.is_done(_LOOK_SECONDS):
                asked.result()  # the server's own reason, if it has one
                if not are_here(store, world_size):
                    raise PeerError(f"the server has taken the connection, but {self._ranks} ranks of it have not come")
            if time.monotonic() - begin > self._timeout.total_seconds():
                seconds = self._timeout.total_seconds()
                raise PeerError(f"the server's {self._ranks} ranks have not come in {seconds:g} s")
        group = TransferGroup.serve(store, world_size, self._device, self._timeout)
        try:
            asked.result()
        except BaseException:
            group.abort()
            group.close()
            raise
        return group

    def _ask(
        self, name: str, call: Callable[..., object], *arguments: Any, failed: Callable[[], object] | None = None
    ) -> ServerCall:
        """Start ``call``, a method of the server, with ``arguments`` on a thread of its own, and return it to be waited
        for. ``name``: of the method, for messages. ``failed``: called on that thread if ``call`` raises."""
        return ServerCall(name, call, *arguments, timeout=self._timeout.total_seconds(), failed=failed)

    def _send(self, group: TransferGroup, bucket: WeightBucket) -> None:
        """Send ``bucket`` to every rank of the server that wants some of it, by one broadcast or a message to each, and
        wait. Raises `PeerError` when a rank is gone."""
        if self._broadcasts:
            group.broadcast(bucket.memory)
            return
        for number, needs in enumerate(self._needs):
            wanted = _wanted(bucket.infos, needs)
            if wanted:
                group.send(_pack(bucket, wanted, needs), 1 + number)


class WeightReceiver:
    """One rank of a server: receives weights from a `WeightSender` and hands them to ``load``; see [Note: an update].

    ``load``: called with a list of (name, tensor) for each bucket of which this rank wants something; the tensors are
    valid until it returns. ``rank``: of this rank among the server's. ``device``: where the weights arrive. ``needs``:
    the weights that this rank wants, by name: a `WeightSlice`, or None for all of it; by default all of every weight.
    ``max_bucket_bytes``: the largest bucket that is accepted. ``timeout``: of each wait for the trainer.
    """

    def __init__(
        self,
        load: Callable[[list[tuple[str, torch.Tensor]]], object],
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        needs: Needs | None = None,
        max_bucket_bytes: int = 1 << 32,
        timeout: timedelta = _TIMEOUT,
    ) -> None:
        self._load = load
        self._rank = rank
        self._device = torch.device(device)
        self._needs = None if needs is None else dict(needs)
        self._max_bucket_bytes = max_bucket_bytes
        self._timeout = timeout
        self._group: TransferGroup | None = None
        self._missing: set[str] | None = None

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any], /) -> None:
        """Leave the process group of an earlier trainer, join this trainer's, and tell it which weights this rank
        wants.

        ``init_info``: ``master_address``, ``master_port``, ``rank_offset`` and ``world_size``. Raises ValueError for
        other values, in which case the earlier group stays, and `PeerError` when the trainer is not there.
        """
        try:
            address, port = str(init_info["master_address"]), int(init_info["master_port"])
            rank, world_size = int(init_info["rank_offset"]) + self._rank, int(init_info["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            told = dict(init_info)
            raise ValueError(f"expected an address, a port, rank_offset and world_size, got {told}") from error
        if not 0 < rank < world_size:
            raise ValueError(f"rank {self._rank} of the server would be rank {rank} of {world_size}")
        self.close()
        self._group = TransferGroup.join(address, port, rank, world_size, self._device, self._timeout)
        self._group.tell_needs(self._needs)

    def start_weight_update(self) -> None:
        """Begin an update. Raises `CommError` without a trainer, and inside another update."""
        if self._group is None:
            raise CommError("no trainer has connected; call init_weight_transfer_engine first")
        if self._missing is not None:
            raise CommError("an update is under way; call finish_weight_update first")
        self._missing = set(self._needs or ())

    def update_weights(self, update_info: Mapping[str, Any], /) -> None:
        """Receive one bucket and call ``load`` with its weights.

        ``update_info``: ``names``, ``dtype_names`` and ``shapes`` of the bucket's weights. Raises ValueError for
        anything else, and for a bucket that is too large; `CommError` outside an update; `PeerError` when the trainer
        is gone; what ``load`` raises. After any of these but the `CommError` the connection is cut and the trainer has
        to connect again.
        """
        if self._group is None or self._missing is None:
            raise CommError("no update is under way; call start_weight_update first")
        try:
            infos = read_weights(update_info)
            wanted = _wanted(infos, self._needs)
            size = bucket_offsets(wanted)[1]
            if size > self._max_bucket_bytes:
                raise ValueError(f"a bucket of {size} bytes is larger than max_bucket_bytes={self._max_bucket_bytes}")
            if wanted:
                memory = torch.empty(size, dtype=torch.uint8, device=self._device)
                if self._group.hear_way():
                    self._group.broadcast(memory)
                else:
                    self._group.receive(memory)
                self._load(list(zip((info.name for info in wanted), bucket_views(wanted, memory), strict=True)))
            self._missing -= {info.name for info in wanted}
        except BaseException:
            self._group.abort()
            self.close()
            raise

    def finish_weight_update(self) -> None:
        """End the update. Raises `CommError` outside an update, and if a weight of ``needs`` has not come, which it
        names; the update is over then too. Without ``needs`` nothing is missing."""
        if self._missing is None:
            raise CommError("no update is under way; call start_weight_update first")
        missing, self._missing = self._missing, None
        if missing:
            raise CommError(f"the trainer has not sent '{min(missing)}' ({len(missing)} weights are missing)")

    def close(self) -> None:
        """Leave the process group, and drop an update that is under way. Does nothing if no group is open."""
        group, self._group, self._missing = self._group, None, None
        if group is not None:
            group.close()


def _remember_last(buckets: Iterator[WeightBucket], last: list[WeightBucket]) -> Iterator[WeightBucket]:
    """Yield ``buckets``, and keep in the list ``last`` the one that was yielded last; ``last`` is empty while the next
    one is being made."""
    for bucket in buckets:
        last[:] = [bucket]
        yield bucket
        last.clear()


def _pass_on_failure(buckets: Iterator[WeightBucket], last: list[WeightBucket], failure: BaseException) -> None:
    """Tell whoever yields ``buckets`` of ``failure``, so that the trainer's other ranks hear of it: throw it into
    ``buckets`` if that is a generator, and call ``stop`` of the bucket in ``last``, if there is one. What they raise
    becomes a note of ``failure``."""
    calls: list[Callable[[BaseException], object]] = [bucket.stop for bucket in last if bucket.stop is not None]
    if isinstance(buckets, Generator):
        calls.insert(0, buckets.throw)
    for call in calls:
        try:
            call(failure)
        except BaseException as error:
            if error is not failure and hasattr(failure, "add_note"):  # of Python 3.11 and later
                failure.add_note(f"The trainer's other ranks could not be told: {type(error).__name__}: {error}")
    if isinstance(buckets, Generator):
        buckets.close()


def _wanted(infos: Sequence[WeightInfo], needs: Needs | None) -> list[WeightInfo]:
    """Return what a rank with ``needs`` (None: all) gets of a bucket of ``infos``: descriptions of full weights or
    slices, in the order of ``infos``. Raises ValueError for a slice that a weight does not have."""
    if needs is None:
        return list(infos)
    slices = [(info, needs[info.name]) for info in infos if info.name in needs]
    return [info if part is None else part.of(info) for info, part in slices]


def _pack(bucket: WeightBucket, wanted: Sequence[WeightInfo], needs: Needs | None) -> torch.Tensor:
    """Return the message (1-D, uint8) for a rank with ``needs``: the weights and slices ``wanted`` (of `_wanted`) of
    ``bucket``, placed as `bucket_offsets` says. If ``needs`` is None this is the bucket's memory itself."""
    if needs is None:
        return bucket.memory
    message = torch.empty(bucket_offsets(wanted)[1], dtype=torch.uint8, device=bucket.memory.device)
    weights = dict(bucket)
    for info, view in zip(wanted, bucket_views(wanted, message), strict=True):
        part = needs[info.name]
        view.copy_(weights[info.name] if part is None else part.cut(weights[info.name]))
    return message
