"""The kernel's facts about a process: whether it runs, and how many bytes its connections have carried.

Ports that are excluded from the count are those of torch's key-value store, whose connections carry no data of the
training.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from .connections import open_sockets

_STOPPED_OR_ENDED = "TtZX"
_USER_TICKS, _SYSTEM_TICKS, _STARTED = 11, 12, 19
"""Fields 14, 15 and 22 of `/proc/PID/stat`, counted from the state."""
_BYTES_ACKED, _TCP_INFO_BYTES = 120, 136
"""Where `struct tcp_info` holds the bytes that peers have acknowledged, then those received; and its length so far."""


@dataclass(frozen=True)
class Process:
    """A process, as others on its host identify it.

    ``place``: the boot of the host and the namespace of its process ids. ``started``: when, as the kernel writes it; it
    tells the process from a later one with its pid.
    """

    place: str
    pid: int
    started: str


def own_process() -> Process | None:
    """Return the identity of this process, by which others on its host can look it up; None where the system has no
    /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Process(f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid(), _stat_fields("self")[_STARTED])
    except OSError:
        return None


def processor_ticks(process: Process) -> int | None:
    """Return the processor time that ``process``, of this host, has used, in the kernel's clock ticks; None if it is
    stopped or has ended."""
    try:
        fields = _stat_fields(str(process.pid))
    except OSError:
        return None
    if fields[0] in _STOPPED_OR_ENDED or fields[_STARTED] != process.started:
        return None
    return int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])


def _stat_fields(pid: str) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the third (the process's state) on. ``pid``: a number, or "self".
    Raises OSError if there is no such process."""
    return Path("/proc", pid, "stat").read_text(errors="replace").rpartition(")")[2].split()


def carried_bytes(but_ports: Collection[int]) -> int:
    """Return how many bytes this process's open TCP connections have sent and received together, except those from or
    to one of ``but_ports``."""
    total = 0
    for descriptor in open_sockets().values():
        with suppress(OSError):  # closed meanwhile, or not connected
            connection = socket.socket(fileno=os.dup(descriptor))
            with connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ports = {connection.getsockname()[1], connection.getpeername()[1]}
                if not ports & set(but_ports):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    total += sum(struct.unpack_from("QQ", info, _BYTES_ACKED))
    return total


def store_ports(store: Store) -> list[int]:
    """Return the port at which ``store`` listens, in a list, if it is a TCP store, also one behind prefixes; an empty
    list for other stores."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return [store.port] if isinstance(store, TCPStore) else []


def carried_by_gloo(but_ports: list[int]) -> int | None:
    """Return the bytes that this process's TCP connections have sent and received, except those from or to
    ``but_ports``; None where gloo does not move the CPU's data, or the system does not count them."""
    if "gloo" not in dist.get_backend_config() or not hasattr(socket, "TCP_INFO"):
        return None
    return carried_bytes(but_ports)
