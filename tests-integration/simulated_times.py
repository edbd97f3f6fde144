"""Collectives on the simulated accelerator, whose `wait` returns at once: what the ledger and the recorder say."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from simulated_accelerator import watch

from zero_comm import Group, Ledger, Tag
from zero_comm.flight_recorder import RECORDER_VARIABLE, process_recorder
from zero_launch.desync import FlightRecord, read_flight_record

LATE = 2.0  # seconds by which rank 1 comes later; more than a busy machine holds rank 0 up


def _group(ledger: Ledger) -> Group:
    return Group(dist.group.WORLD, ledger=ledger)


def _gather(group: Group, name: str) -> torch.Tensor:
    out = torch.empty(1024 * group.world_size, device="sim")
    group.all_gather(out, torch.full((1024,), float(group.rank), device="sim"), Tag("gather", name)).wait()
    return out


def awaited(times_devices: bool) -> tuple[tuple[float, float], int, float, list[str]]:
    """Gather once for which rank 1 comes late; return the ledger's seconds and untimed collectives, the seconds for
    which the host was in the calls, and its stops."""
    ledger = Ledger()
    ledger.times_devices = times_devices
    group = _group(ledger)
    _gather(group, "warm")
    torch.accelerator.synchronize()
    ledger.count_completed()
    dist.barrier()
    ledger.reset()
    if group.rank == 1:
        time.sleep(LATE)
    with watch() as report:
        began = time.perf_counter()
        _gather(group, "late")
        host = time.perf_counter() - began
        stops = [str(stop) for stop in report.stops]
    torch.accelerator.synchronize()
    return ledger.seconds("gather"), ledger.untimed("gather"), host, stops


def recorded(folder: Path) -> list[FlightRecord]:
    """Return what the flight recorder has before a collective for which rank 1 comes late, while the device of rank 0
    stands, and after it."""
    os.environ[RECORDER_VARIABLE] = str(folder / f"rank {dist.get_rank()}")
    process_recorder.cache_clear()
    try:
        group = _group(Ledger())
        recorder = process_recorder()
        assert recorder is not None
        _gather(group, "warm")
        torch.accelerator.synchronize()
        recorder.look_at_device()
        found = [_read(folder)]
        dist.barrier()
        if group.rank == 1:
            time.sleep(6.0)
        _gather(group, "late")
        if group.rank == 0:
            time.sleep(5.2)
        recorder.look_at_device()
        found.append(_read(folder))
        torch.accelerator.synchronize()
        recorder.look_at_device()
        return [*found, _read(folder)]
    finally:
        del os.environ[RECORDER_VARIABLE]
        process_recorder.cache_clear()


def _read(folder: Path) -> FlightRecord:
    record = read_flight_record(folder / f"rank {dist.get_rank()}")
    assert record is not None
    return record
