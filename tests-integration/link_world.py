"""Rank 0 of a world of any size on one accelerator: collectives take the time of a link, and send nothing.

`open_world` gives torch.distributed the backend `fake` with process groups of this file. A collective waits for the
stream that started it, keeps one stream busy for ``latency + bytes / bandwidth`` and then fills its result from this
rank's own numbers; all collectives of the world share that stream, as they would share a link. Kernels, streams, memory
and the host's time are those of rank 0 of a real job; only the numbers are not. FSDP2 and our engine (see
zero_comm.alike) both train in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # torch's own `fake`, replaced below
from torch._C._distributed_c10d import _create_work_from_future

from zero_comm import AlikeStore

_CALIBRATED = 100_000_000  # cycles


class Link:
    """A stream that is busy while bytes are under way. ``bandwidth`` in bytes per second, 0 for no time at all;
    ``latency`` in seconds."""

    def __init__(self, bandwidth: float, latency: float) -> None:
        self._bandwidth, self._latency = bandwidth, latency
        self.store: AlikeStore | None = None
        self._stream = torch.cuda.Stream()
        self.bytes = self.calls = 0
        torch.cuda._sleep(_CALIBRATED // 10)
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        torch.cuda._sleep(_CALIBRATED)
        ended.record()
        torch.cuda.synchronize()
        self._cycles_per_second = _CALIBRATED / (began.elapsed_time(ended) / 1e3)

    def send(self, nbytes: int, fill: Callable[[], object], buffers: list[torch.Tensor]) -> dist.Work:
        """Keep the link busy for ``nbytes``, then ``fill``; return the work, whose ``wait`` orders the current stream
        behind it."""
        self.bytes += nbytes
        self.calls += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[torch.cuda.current_device()])
        with torch.cuda.stream(self._stream):
            seconds = self._latency + (nbytes / self._bandwidth if self._bandwidth else 0.0)
            if seconds and self._bandwidth:
                torch.cuda._sleep(int(seconds * self._cycles_per_second))
            fill()
            done.set_result(buffers)
        return _create_work_from_future(done)


class LinkGroup(dist.ProcessGroup):
    """A process group of which this process is the only rank that exists."""

    def __init__(self, rank: int, size: int, name: str, link: Link) -> None:
        super().__init__(rank, size)
        self._name = name
        self._link = link

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # torch calls it by this name
        return "fake"

    def _send(self, sent: int, fill: Callable[[], object], *tensors: torch.Tensor) -> dist.Work:
        if tensors[0].device.type != "cuda":
            fill()
            done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            done.set_result(list(tensors))
            return _create_work_from_future(done)
        return self._link.send(sent, fill, list(tensors))

    def _share(self, whole: torch.Tensor) -> int:
        return whole.nbytes * (self.size() - 1) // self.size()

    def _allgather_base(self, out: torch.Tensor, mine: torch.Tensor, *_: Any) -> dist.Work:
        parts, own = out.view(self.size(), -1), mine.view(-1)

        def fill() -> None:
            others = [part for part in parts if part.data_ptr() != own.data_ptr()]
            torch._foreach_copy_(others, [own] * len(others))

        return self._send(self._share(out), fill, out, mine)

    def allgather(self, outs: list[list[torch.Tensor]], mine: list[torch.Tensor], *_: Any) -> dist.Work:
        def fill() -> None:
            for out, own in zip(outs, mine, strict=True):
                for part in out:
                    part.copy_(own)

        return self._send(mine[0].nbytes * (self.size() - 1), fill, *outs[0], *mine)

    def _reduce_scatter_base(self, out: torch.Tensor, flat: torch.Tensor, *_: Any) -> dist.Work:
        own = flat.view(-1)[: out.numel()].view_as(out)
        return self._send(self._share(flat), lambda: out.copy_(own), out, flat)

    def alltoall_base(self, out: torch.Tensor, flat: torch.Tensor, *_: Any) -> dist.Work:
        return self._send(self._share(flat), lambda: out.copy_(flat.view_as(out)), out, flat)

    all_gather_single = _allgather_base  # torch 2.13's names
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def allreduce(self, tensors: list[torch.Tensor], *_: Any) -> dist.Work:
        return self._send(2 * self._share(tensors[0]), lambda: None, *tensors)

    def broadcast(self, tensors: list[torch.Tensor], *_: Any) -> dist.Work:
        return self._send(0, lambda: None, *tensors)

    def barrier(self, *_: Any) -> dist.Work:
        return self._send(0, lambda: None, torch.empty(1))


def open_world(ranks: int, gigabytes_per_second: float, latency_us: float = 20.0) -> Link:
    """Make this process rank 0 of ``ranks``; return the link of the world."""
    link = Link(gigabytes_per_second * 1e9, latency_us * 1e-6)

    def group(options: Any, _: Any) -> LinkGroup:
        return LinkGroup(options.group_rank, options.group_size, options.group_id, link)

    dist.Backend.register_backend("fake", group, extended_api=True, devices=["cpu", "cuda"])
    link.store = AlikeStore(ranks)  # kept: torch holds its C++ half alone
    dist.init_process_group("fake", store=link.store, rank=0, world_size=ranks)
    return link
