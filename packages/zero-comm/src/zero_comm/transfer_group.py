"""A process group between two programs: one sender and the ranks of a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from .connections import Connections
from .errors import CommError, PeerError
from .store import listen
from .weights import Needs, WeightSlice

SENDER = 0
"""The rank of the sender; the server's ranks follow it."""


class TransferGroup:
    """Sends tensors from one sender to the ranks of a server, beside either program's default process group.

    gloo carries tensors on the CPU, NCCL those on CUDA devices, where a transfer's wait only makes the current stream
    wait. Every tensor is contiguous and on ``device``. Made by `serve` on the sender and by `join` on the others,
    together; both wait for all ranks, at most for ``timeout``, and raise ValueError for another kind of device.

    The two sides meet in ``store``, a key-value store, where the server's ranks also leave which weights they want and
    the sender leaves how it sends. ``rank``: in the group, 0 for the sender; ``world_size``: all ranks, the sender
    included.
    """

    def __init__(self, store: Store, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._store = store
        self._connections = Connections()
        with self._connections.recording():
            self._group = _open_backend(store, rank, world_size, device, timeout)

    @classmethod
    def serve(cls, store: Store, world_size: int, device: torch.device, timeout: timedelta) -> TransferGroup:
        """Return the sender's end, with ``world_size`` ranks, this one included; ``store``: from `open_transfer_store`.

        Raises `PeerError` when the others do not come within ``timeout``.
        """
        return cls(store, SENDER, world_size, device, timeout)

    @classmethod
    def join(
        cls, address: str, port: int, rank: int, world_size: int, device: torch.device, timeout: timedelta
    ) -> TransferGroup:
        """Return the end of one of the server's ranks: number ``rank`` of the group, from 1, of ``world_size`` with the
        sender.

        Raises `PeerError` when the sender is not at ``address`` and ``port``, or ranks do not come within ``timeout``.
        """
        try:
            store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except (RuntimeError, OSError) as error:
            raise PeerError(f"no sender of weights is at {address} port {port}: {error}") from error
        store.set(f"here/{rank}", "")
        return cls(store, rank, world_size, device, timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the sender's ``tensor`` into every rank's, and wait. Collective over the group, with equal dtypes and
        sizes. Raises `PeerError` when a rank is gone, and `CommError` after `close`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        self._wait(lambda: self._group.broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send ``tensor`` to ``rank``, which calls `receive` with one of its size, and wait; only on the sender. Raises
        `PeerError` when that rank is gone, and `CommError` after `close`."""
        self._wait(lambda: self._group.send([tensor], rank, 0))

    def receive(self, tensor: torch.Tensor) -> None:
        """Write what the sender sends to this rank (`send`) into ``tensor``, and wait. Raises `PeerError` when the
        sender is gone, and `CommError` after `close`."""
        self._wait(lambda: self._group.recv([tensor], SENDER, 0))

    def tell_needs(self, needs: Needs | None) -> None:
        """Store for the sender which weights this rank of the server wants, without waiting. ``needs``: by name; None
        for all of every weight."""
        told: Any = None if needs is None else {n: s and [s.dim, s.start, s.length] for n, s in needs.items()}
        self._store.set(f"needs/{self.rank}", json.dumps(told))

    def hear_needs(self) -> list[Needs | None]:
        """Return which weights each of the server's ranks wants, in rank order; None for a rank that wants all of every
        weight. Called by the sender; waits for `tell_needs` of every rank. Raises `PeerError` when one does not come in
        time."""
        try:
            told = [json.loads(self._store.get(f"needs/{rank}")) for rank in range(1, self.world_size)]
        except (RuntimeError, OSError) as error:
            raise PeerError(f"a rank of the server has not said which weights it wants: {error}") from error
        return [None if one is None else _read_needs(one) for one in told]

    def tell_way(self, *, broadcasts: bool) -> None:
        """Store for the server's ranks how buckets will come: with ``broadcasts`` each by one broadcast to all ranks,
        else to each rank by a message with its share. Called by the sender, once."""
        self._store.set("way", "broadcast" if broadcasts else "messages")

    def hear_way(self) -> bool:
        """Return whether each bucket comes by one broadcast, and not by a message to each rank; wait until the sender
        has said so (`tell_way`). Raises `PeerError` when the sender is gone, or does not say it in time."""
        try:
            return self._store.get("way") == b"broadcast"
        except (RuntimeError, OSError) as error:
            raise PeerError(f"the sender of weights has not said how it sends: {error}") from error

    def abort(self) -> None:
        """Cut the group's connections, so that no rank, of either program, waits in a transfer. May be called by any
        thread, before `close`; only `close` may follow."""
        self._connections.sever()
        group = self._group
        if group is not None and self.device.type != "cpu":
            group.abort()

    def close(self) -> None:
        """Leave the group, without waiting for others; no transfer may follow. Does nothing if it was called before."""
        self._group = None

    def _wait(self, start: Any) -> None:
        """Call ``start``, which starts one transfer and returns its handle, and wait for it: on a CUDA device the
        current stream waits. Raises `PeerError` when it fails, and `CommError` after `close`."""
        if self._group is None:
            raise CommError("this transfer group is closed; connect again")
        try:
            start().wait()
        except RuntimeError as error:
            raise PeerError(f"a transfer of weights failed on rank {self.rank} of its group: {error}") from error


def open_transfer_store(address: str, port: int, timeout: timedelta) -> tuple[TCPStore, int]:
    """Listen on ``address`` and ``port`` (0: a free one) for the ranks of a server; return the store at which they
    meet, and its port. ``timeout``: of waits at the store.

    Raises OSError when this host cannot listen there.
    """
    server = listen(address, port)
    port = server.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=server.detach()
    )
    return store, port


def are_here(store: Store, world_size: int) -> bool:
    """Return whether all ranks of the server, 1 to ``world_size`` - 1 of the group, have come to ``store``."""
    return store.check([f"here/{rank}" for rank in range(1, world_size)])


def _open_backend(store: Store, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> Any:
    """Return the process group of gloo or NCCL for tensors on ``device``, with this process as ``rank``, once all
    ``world_size`` ranks have met in ``store``. Raises `PeerError` when ranks do not come within ``timeout``, and
    ValueError for another kind of device."""
    try:
        if device.type == "cpu":
            return dist.ProcessGroupGloo(store, rank, world_size, timeout)
        if device.type == "cuda":
            return dist.ProcessGroupNCCL(store, rank, world_size, timeout)  # type: ignore[arg-type]
    except RuntimeError as error:
        others = world_size - 1
        raise PeerError(f"rank {rank} of a group for weights did not meet the other {others}: {error}") from error
    raise ValueError(f"weights are sent between CPUs (gloo) or CUDA devices (NCCL), got device {device}")


def _read_needs(told: Mapping[str, Any]) -> Needs:
    """Return the needs of one rank from ``told``, which `TransferGroup.tell_needs` wrote: a slice as three numbers
    (dim, start, length), or None, by name. Raises `PeerError` for anything else."""
    try:
        return {str(n): None if s is None else WeightSlice(*(int(number) for number in s)) for n, s in told.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise PeerError(f"a rank of the server wants {told!r:.200}, which are no slices of weights") from error
