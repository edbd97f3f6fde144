"""Send full weights from a trainer to the ranks of an inference server, by the calls of vLLM's weight transfer.

[Note: an update] The trainer drives the server by four calls, which vLLM names. ``init_weight_transfer_engine`` makes
both join one process group: the trainer is rank 0, the server's ranks follow from ``rank_offset``. An update is
``start_weight_update``, then ``update_weights`` for each bucket, then ``finish_weight_update``. The bytes of a bucket
travel over the process group while ``update_weights`` runs. Ranks that want all weights get each bucket by one
broadcast; if any rank wants slices, each rank is sent what it wants, in one message per bucket, and nothing else.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, Protocol

import torch

from .errors import CommError, PeerError
from .transfer_group import TransferGroup, are_here, open_transfer_store
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


class WeightServer(Protocol):
    """The calls by which a trainer drives a server; vLLM's ``VLLMWeightSyncClient`` has the same. Each returns when
    every rank of the server is done."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> object:
        """Have every rank of the server join the process group that ``init_info`` describes."""

    def start_weight_update(self) -> object:
        """Prepare for new weights."""

    def update_weights(self, update_info: dict[str, Any], /) -> object:
        """Receive and load the weights that ``update_info`` names."""

    def finish_weight_update(self) -> object:
        """End the update: all weights are there."""


class WeightServerClient:
    """Drives a server over HTTP, by the routes of a vLLM server. ``url``: its address, as "http://127.0.0.1:8000".
    ``timeout``: seconds that one call may take. No proxy is used. Calls raise `PeerError` when the server refuses them
    or cannot be reached."""

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def init_weight_transfer_engine(self, init_info: dict[str, Any], /) -> None:
        """Have every rank of the server join the process group that ``init_info`` describes."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Prepare the server for new weights."""
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any], /) -> None:
        """Have the server receive and load the weights that ``update_info`` names."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        """End the server's update: all weights are there."""
        self._post("finish_weight_update", {})

    def _post(self, route: str, content: dict[str, Any]) -> None:
        """Post ``content`` as JSON to ``route`` and wait for the answer, whose body is ignored. Raises `PeerError`,
        with the server's words if it answered, when it refuses or cannot be reached."""
        request = urllib.request.Request(
            f"{self._url}/{route}", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        try:
            with self._opener.open(request, timeout=self._timeout):
                pass
        except urllib.error.HTTPError as error:
            told = error.read(2000).decode(errors="replace")
            raise PeerError(f"the server at {self._url} answered {error.code} to {route}: {told}") from error
        except OSError as error:
            raise PeerError(f"the server at {self._url} did not answer {route}: {error}") from error


class WeightSender:
    """Sends buckets of full weights to the ranks of a server; see [Note: an update].

    ``server``: the calls that drive it. ``ranks``: of the server. ``is_sender``: whether this rank of the trainer
    sends, which exactly one does; the others only iterate, so that the buckets can be gathered. ``address``: of this
    host, where the server's ranks reach it; ``port``: 0 takes a free one. ``device``: of the buckets. ``timeout``: of
    each wait for the server's ranks. Raises OSError when the sender cannot listen there, ValueError for another kind of
    device than CPU and CUDA, `PeerError` when the server's ranks do not come, and what the server's call raises.
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
        self._group: TransferGroup | None = None
        self._needs: list[Needs | None] = []
        self._broadcasts = True
        if is_sender:
            self._group = self._connect(address, port, ranks, torch.device(device), timeout)
            self._needs = self._group.hear_needs()
            self._broadcasts = all(needs is None for needs in self._needs)
            self._group.tell_way(broadcasts=self._broadcasts)

    def send(self, buckets: Iterable[WeightBucket]) -> None:
        """Send all ``buckets`` (`Engine.iter_full_weights`) as one update. Every rank of the trainer calls it.

        Raises on the sender what the server's calls raise, `PeerError` when one of its ranks is gone, and ValueError
        when one wants a slice that a weight does not have; on every rank what ``buckets`` raises. The transfer is over
        then: make a new sender, because this one's `send` only iterates from then on, as after `close`. ``buckets`` are
        closed in any case, so the trainer's other ranks raise too.
        """
        try:
            if self._group is None:
                for _ in buckets:
                    pass
            else:
                self._update(self._group, buckets)
        except BaseException:
            self.close(abort=True)
            raise
        finally:
            getattr(buckets, "close", lambda: None)()

    def close(self, *, abort: bool = False) -> None:
        """Leave the process group; a later `send` only iterates and sends nothing. May be called again. ``abort``: cut
        transfers that the server waits in."""
        group, self._group = self._group, None
        if group is not None:
            if abort:
                group.abort()
            group.close()

    def _connect(self, address: str, port: int, ranks: int, device: torch.device, timeout: timedelta) -> TransferGroup:
        """Listen for the server's ranks, ask the server to have them join, and return the process group when all have.

        A thread runs the server's call meanwhile. Raises OSError when this host cannot listen there, `PeerError` when
        the ranks do not come within ``timeout``, and what the server's call raises.
        """
        store, port = open_transfer_store(address, port, timeout)
        told = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": 1 + ranks}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self._server.init_weight_transfer_engine, told)
            begin = time.monotonic()
            while not are_here(store, 1 + ranks):
                if wait([asked], _LOOK_SECONDS).done:
                    asked.result()  # the server's own reason, if it has one
                    raise PeerError(f"the server has taken the connection, but {ranks} ranks of it have not come")
                if time.monotonic() - begin > timeout.total_seconds():
                    raise PeerError(f"the server's {ranks} ranks have not come in {timeout.total_seconds():.0f} s")
            group = TransferGroup.serve(store, 1 + ranks, device, timeout)
            asked.result()
        return group

    def _update(self, group: TransferGroup, buckets: Iterable[WeightBucket]) -> None:
        """Send ``buckets`` as one update, each while the server's ranks receive it.

        A thread runs the server's `update_weights` meanwhile; if it fails, the group is aborted, so that no transfer
        waits, and its error is raised.
        """
        self._server.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            for bucket in buckets:
                asked: Future[object] = pool.submit(self._server.update_weights, describe_weights(bucket.infos))
                asked.add_done_callback(lambda done: group.abort() if done.exception() is not None else None)
                try:
                    self._send(group, bucket)
                except BaseException:
                    group.abort()
                    asked.result()  # the server's own reason, if it has one
                    raise
                asked.result()
        self._server.finish_weight_update()

    def _send(self, group: TransferGroup, bucket: WeightBucket) -> None:
        """Send ``bucket`` to every rank of the server that wants some of it, by one broadcast or a message to each, and
        wait."""
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
        """Join the trainer's process group, and leave an earlier one.

        ``init_info``: ``master_address``, ``master_port``, ``rank_offset`` and ``world_size``. Raises ValueError for
        other values, in which case the earlier one stays, and `PeerError` when the trainer is not there.
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
        """Receive one bucket and load it.

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
        """End the update. Raises `CommError` outside one, and, naming it, if a weight of ``needs`` has not come; the
        update is over then too. Without ``needs`` nothing is missing."""
        if self._missing is None:
            raise CommError("no update is under way; call start_weight_update first")
        missing, self._missing = self._missing, None
        if missing:
            raise CommError(f"the trainer has not sent '{min(missing)}' ({len(missing)} weights are missing)")

    def close(self) -> None:
        """Leave the process group, and drop an update that is under way. May be called again."""
        group, self._group, self._missing = self._group, None, None
        if group is not None:
            group.close()


def _wanted(infos: Sequence[WeightInfo], needs: Needs | None) -> list[WeightInfo]:
    """Return descriptions of what a rank with ``needs`` gets of a bucket of ``infos``, in their order: full weights or
    slices. Raises ValueError for a slice that a weight does not have."""
    if needs is None:
        return list(infos)
    slices = [(info, needs[info.name]) for info in infos if info.name in needs]
    return [info if part is None else part.of(info) for info, part in slices]


def _pack(bucket: WeightBucket, wanted: Sequence[WeightInfo], needs: Needs | None) -> torch.Tensor:
    """Return the message (1-D, uint8) with what a rank with ``needs`` gets of ``bucket``: ``wanted``, one behind the
    other."""
    if needs is None:
        return bucket.memory
    message = torch.empty(bucket_offsets(wanted)[1], dtype=torch.uint8, device=bucket.memory.device)
    weights = dict(bucket)
    for info, view in zip(wanted, bucket_views(wanted, message), strict=True):
        part = needs[info.name]
        view.copy_(weights[info.name] if part is None else part.cut(weights[info.name]))
    return message
