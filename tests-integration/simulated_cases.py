"""Programs for the simulated accelerator: with one race each, with one stop of the host each, and without any."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from simulated_accelerator import Report, configure, host_access, watch

from zero_offload import HostStore, park, unpark

DEVICE = "sim"
N = 1000


def streams(count: int) -> list[torch.Stream]:
    return [torch.Stream(DEVICE) for _ in range(count)]


def keep_busy() -> None:
    """Queue some tenths of a second of work on the current stream."""
    x = torch.ones(1500, 1500, device=DEVICE)
    torch.mm(x, x)


# ---------------------------------------------------------------------------------------------------------------------
# Races


def read_of_another_stream_without_wait() -> None:
    x = torch.zeros(N, device=DEVICE)
    (side,) = streams(1)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.fill_(1)
    x.sum()


def write_of_another_stream_without_wait() -> None:
    x = torch.zeros(N, device=DEVICE)
    (side,) = streams(1)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    x.mul_(2)
    torch.accelerator.current_stream().wait_stream(side)
    del y


def overlapping_views() -> None:
    x = torch.zeros(N, device=DEVICE)
    (side,) = streams(1)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x[: N // 2 + 1].fill_(1)
    x[N // 2 :].fill_(2)


def event_recorded_too_early() -> None:
    x = torch.zeros(N, device=DEVICE)
    (side,) = streams(1)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        event = side.record_event()
        x.fill_(1)
    torch.accelerator.current_stream().wait_event(event)
    x.sum()


def allocated_on_another_stream_without_wait() -> None:
    x = torch.empty(N, device=DEVICE)
    (side,) = streams(1)
    with side:
        x.fill_(1)
    torch.accelerator.current_stream().wait_stream(side)


def freed_while_a_stream_uses_it() -> None:
    x = torch.zeros(N, device=DEVICE)
    (side,) = streams(1)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    del x
    torch.accelerator.current_stream().wait_stream(side)
    del y


def pinned_memory_written_before_its_copy() -> None:
    host = torch.zeros(N, pin_memory=True)
    x = torch.empty(N, device=DEVICE)
    x.copy_(host, non_blocking=True)
    host.fill_(1)


def pinned_memory_read_before_its_copy() -> None:
    host = torch.zeros(N, pin_memory=True)
    host.copy_(torch.ones(N, device=DEVICE), non_blocking=True)
    host.sum()


def pinned_memory_read_by_foreign_code() -> None:
    host = torch.zeros(N, pin_memory=True)
    host.copy_(torch.ones(N, device=DEVICE), non_blocking=True)
    host_access(host, write=False)


def gather_without_wait() -> None:
    shard = torch.ones(N, device=DEVICE)
    out = torch.zeros(N * dist.get_world_size(), device=DEVICE)
    work = dist.all_gather_into_tensor(out, shard, async_op=True)
    out.sum()
    work.wait()


def input_of_a_reduction_written_before_wait() -> None:
    x = torch.ones(N, device=DEVICE)
    work = dist.all_reduce(x, async_op=True)
    x.zero_()
    work.wait()


RACES: dict[str, tuple[Callable[[], None], set[str]]] = {
    case.__name__: (case, names)
    for case, names in [
        (read_of_another_stream_without_wait, {"aten::fill_.Scalar", "aten::sum.IntList_out"}),
        (write_of_another_stream_without_wait, {"aten::add.out", "aten::mul.out"}),
        (overlapping_views, {"aten::fill_.Scalar"}),
        (event_recorded_too_early, {"aten::fill_.Scalar", "aten::sum.IntList_out"}),
        (allocated_on_another_stream_without_wait, {"allocate", "aten::fill_.Scalar"}),
        (freed_while_a_stream_uses_it, {"aten::add.out", "free"}),
        (pinned_memory_written_before_its_copy, {"copy from the host", "aten::fill_"}),
        (pinned_memory_read_before_its_copy, {"copy to the host", "aten::sum"}),
        (pinned_memory_read_by_foreign_code, {"copy to the host", "read by the host"}),
        (gather_without_wait, {"collective _ALLGATHER_BASE", "aten::sum.IntList_out"}),
        (input_of_a_reduction_written_before_wait, {"collective ALLREDUCE", "aten::zero_"}),
    ]
}


def watched(case: str) -> Report:
    with watch() as report:
        RACES[case][0]()
    return report


# ---------------------------------------------------------------------------------------------------------------------
# Stops of the host


def every_stop() -> tuple[Report, dict[int, str]]:
    """Stop the host once per line, and return the lines with the beginning of what each should be reported as."""
    x = torch.arange(10.0, device=DEVICE)
    pinned = torch.zeros(10, pin_memory=True)
    expected: dict[int, str] = {}

    def line(what: str) -> None:
        import sys

        expected[sys._getframe(1).f_lineno] = what

    with watch() as report:
        x.sum().item(), line("aten::_local_scalar_dense")
        bool(x[1] > 0), line("aten::_local_scalar_dense")
        x.nonzero(), line("aten::nonzero")
        x.masked_select(x > 3), line("aten::masked_select")
        x[x > 3], line("aten::nonzero")
        x[x > 99], line("aten::nonzero")
        x.unique(), line("aten::_unique2")
        torch.equal(x, x), line("aten::equal")
        x.cpu(), line("copy to the host, not pinned")
        pinned.copy_(x), line("copy to the host, blocking")
        x.copy_(pinned), line("copy from the host, blocking")
        x.copy_(torch.zeros(10), non_blocking=True), line("copy from the host, not pinned")
        x.bfloat16().copy_(pinned, non_blocking=True), line("copy from the host, converted on the way")
        torch.tensor(1.0, device=DEVICE), line("copy from the host, not pinned")
        torch.accelerator.synchronize(), line("synchronize the device")
        torch.accelerator.current_stream().synchronize(), line("synchronize a stream")
        torch.accelerator.current_stream().record_event().synchronize(), line("synchronize an event")
    return report, expected


def no_stop() -> Report:
    """A step of training that leaves the host alone."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = torch.randn(4, 8, pin_memory=True)
    with watch() as report:
        x = batch.to(DEVICE, non_blocking=True)
        loss = torch.nn.functional.cross_entropy(model(x), torch.zeros(4, dtype=torch.long, device=DEVICE))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told = torch.empty((), pin_memory=True)
        told.copy_(loss.detach(), non_blocking=True)
    return report


# ---------------------------------------------------------------------------------------------------------------------
# Random programs


class Program:
    """Operations on a few buffers in random streams, each behind the last operations on what it uses."""

    def __init__(self, seed: int, correct: bool) -> None:
        self.random = random.Random(seed)
        self.streams = streams(3)
        self.correct = correct
        self.left_out = range(8, 16)
        self.device = [torch.zeros(64, device=DEVICE) for _ in range(4)]
        self.plain = [torch.zeros(64) for _ in range(4)]
        ready = torch.accelerator.current_stream().record_event()
        self.last = [ready] * 4

    def operation(self, number: int) -> None:
        stream = self.random.choice(self.streams)
        into, other = self.random.sample(range(4), 2)
        scale, start = self.random.randrange(1, 4), self.random.randrange(0, 32)
        if self.correct or number not in self.left_out:
            stream.wait_event(self.last[into])
            stream.wait_event(self.last[other])
        with stream:
            for values in (self.device, self.plain):
                values[into].mul_(0.5).add_(values[other][start : start + 32].sum(), alpha=scale).add_(1)
        self.last[into] = self.last[other] = stream.record_event()

    def equal(self) -> bool:
        for event in self.last:
            torch.accelerator.current_stream().wait_event(event)
        return all(torch.equal(x.cpu(), y) for x, y in zip(self.device, self.plain, strict=True))


def random_programs(seeds: range, correct: bool) -> list[tuple[int, bool]]:
    """Run one program per seed, with the delays of that seed; return races and whether the values are the CPU's."""
    found: list[tuple[int, bool]] = []
    for seed in seeds:
        configure(seed=seed + 1, longest_delay=100)
        with watch() as report:
            program = Program(seed, correct)
            for number in range(24):
                program.operation(number)
            equal = program.equal()
        found.append((len(report.races), equal))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Values


def reused_too_early() -> list[float]:
    """Return the sums of a buffer that was copied to the device and then overwritten: in time, and too early."""
    configure(seed=0)
    sums = []
    for waits in (True, False):
        host = torch.ones(1 << 20, pin_memory=True)
        copy = torch.empty(1 << 20, device=DEVICE)
        keep_busy()
        copy.copy_(host, non_blocking=True)
        if waits:
            torch.accelerator.synchronize()
        host.zero_()
        sums.append(float(copy.sum()))
    return sums


def trained(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Train a small model and return its loss and weights on the CPU."""
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(11, 16), torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 11)).to(dtype)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step)).to(device)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **{name: value.cpu() for name, value in model.state_dict().items()}}


def parked_twice() -> list[tuple[int, bool]]:
    """Return the address in host memory of what was parked, and whether its values came back, for two times."""
    configure(seed=0)
    store = HostStore(device=DEVICE, keep_memory=True)
    tensors = {"moments": torch.arange(4096.0, device=DEVICE)}
    seen = []
    for _ in range(2):
        park(tensors, store)
        address = store.borrow("moments").data_ptr()
        unpark(tensors, store)
        seen.append((address, torch.equal(tensors["moments"].cpu(), torch.arange(4096.0))))
    return seen
