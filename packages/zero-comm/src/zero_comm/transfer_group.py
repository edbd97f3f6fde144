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
    ``store``: through it they meet and tell small facts.
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
        """Return the end of the server's rank that has number ``rank`` in the group, from 1.

        Raises `PeerError` when the sender is not at ``address`` and ``port``, or ranks do not come within ``timeout``.
        """
        try:
            store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except (RuntimeError, OSError) as error:
            raise PeerError(f"no sender of weights is at {address} port {port}: {error}") from error
        store.set(f"here/{rank}", "")
        return cls(store, rank, world_size, device, timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the sender's ``tensor`` into every rank's, and wait. Collective over the group. Raises `PeerError` when
        a rank is gone, and `CommError` after `close`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        self._wait(lambda: self._group.broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send ``tensor`` to ``rank``, which calls `receive` with one of its size, and wait; only on the sender. Raises
        `PeerError` when that rank is gone, and `CommError` after `close`."""
        self._wait(lambda: self._group.send([tensor], rank, 0))

    def receive(self, tensor: torch.Tensor) -> None:
        """Write what the sender sends (`send`) into ``tensor``, and wait. Raises `PeerError` when it is gone, and
        `CommError` after `close`."""
        self._wait(lambda: self._group.recv([tensor], SENDER, 0))

    def tell_needs(self, needs: Needs | None) -> None:
        """Store for the sender which weights this rank of the server wants, without waiting; None: all of every
        weight."""
        told: Any = None if needs is None else {n: s and [s.dim, s.start, s.length] for n, s in needs.items()}
        self._store.set(f"needs/{self.rank}", json.dumps(told))

    def hear_needs(self) -> list[Needs | None]:
        """Return what each of the server's ranks wants, in rank order, None for all of every weight; wait for those
        that have not said it. Called by the sender. Raises `PeerError` when one does not say so in time."""
        try:
            told = [json.loads(self._store.get(f"needs/{rank}")) for rank in range(1, self.world_size)]
        except (RuntimeError, OSError) as error:
            raise PeerError(f"a rank of the server has not said which weights it wants: {error}") from error
        return [None if one is None else _read_needs(one) for one in told]

    def tell_way(self, *, broadcasts: bool) -> None:
        """Store for the server's ranks whether every bucket comes by a broadcast, or each rank's share by a message;
        called by the sender, once."""
        self._store.set("way", "broadcast" if broadcasts else "messages")

    def hear_way(self) -> bool:
        """Return whether buckets come by a broadcast; wait until the sender has said so. Raises `PeerError` when it is
        gone, or does not say it in time."""
        try:
            return self._store.get("way") == b"broadcast"
        except (RuntimeError, OSError) as error:
            raise PeerError(f"the sender of weights has not said how it sends: {error}") from error

    def abort(self) -> None:
        """Cut the connections, so that no rank waits in a transfer, here or there; from any thread, before `close`.
        Only `close` may follow."""
        self._connections.sever()
        group = self._group
        if group is not None and self.device.type != "cpu":
            group.abort()

    def close(self) -> None:
        """Leave the group, without waiting for others. May be called again; no transfer may follow."""
        self._group = None

    def _wait(self, start: Any) -> None:
        """Call ``start``, which starts one transfer, and wait for it: on a CUDA device the current stream waits. Raises
        `PeerError` when it fails, and `CommError` after `close`."""
        if self._group is None:
            raise CommError("this transfer group is closed; connect again")
        try:
            start().wait()
        except RuntimeError as error:
            raise PeerError(f"a transfer of weights failed on rank {self.rank} of its group: {error}") from error


def open_transfer_store(address: str, port: int, timeout: timedelta) -> tuple[TCPStore, int]:
    """Listen on ``address`` and ``port`` (0: a free one) for the ranks of a server; return the store and the port.

    Raises OSError when this host cannot listen there.
    """
    server = listen(address, port)
    port = server.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=server.detach()
    )
    return store, port


def are_here(store: Store, world_size: int) -> bool:
    """Return whether all ranks but the sender have come to ``store``."""
    return store.check([f"here/{rank}" for rank in range(1, world_size)])


def _open_backend(store: Store, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> Any:
    """Return the backend's own process group for ``device``. Raises `PeerError` when ranks do not come, ValueError for
    a device without one."""
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
    """Return needs from what `TransferGroup.tell_needs` wrote. Raises `PeerError` for anything else."""
    try:
        return {str(n): None if s is None else WeightSlice(*(int(number) for number in s)) for n, s in told.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise PeerError(f"a rank of the server wants {told!r:.200}, which are no slices of weights") from error
