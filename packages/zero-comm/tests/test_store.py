"""The store of ranks that another launcher started: where it listens, and what it says when it cannot."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from zero_comm.discovery import RankEnvironment
from zero_comm.store import open_store

MEET = """
import sys, torch.distributed as dist, zero_comm
zero_comm.init("cpu")
print("met", flush=True)
sys.stdin.read()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def listening_addresses(port: int) -> list[str]:
    """The addresses on which anything on this host listens at ``port``, by /proc/net."""
    found = []
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net", name)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            address, _, number = line.split()[1].rpartition(":")
            if line.split()[3] == "0A" and int(number, 16) == port:
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                family = socket.AF_INET if name == "tcp" else socket.AF_INET6
                found.append(socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)))
    return found


def meet(port: int, variables: Sequence[Mapping[str, str]]) -> list[str]:
    """Start a rank for each of ``variables``, on top of this process's environment without torchrun's; return the
    addresses on which the store listens at ``port`` while they run."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    common = {name: value for name, value in os.environ.items() if name not in names} | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET],
            env={**common, "MASTER_PORT": str(port), **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for own in variables
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert any(line == b"met\n" for line in process.stdout), process.communicate(timeout=60)
        found = listening_addresses(port)
        assert [process.communicate(timeout=60)[0] for process in ranks] == [b"", b""]
        assert [process.returncode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return found


@pytest.mark.parametrize(
    ("local_size", "master", "expected"),
    [(2, None, "127.0.0.1"), (2, "localhost", "127.0.0.1"), (1, "127.0.0.2", "127.0.0.2")],
    ids=["one host", "one host, named", "several hosts"],
)
def test_the_store_of_ranks_of_mpirun_listens_on_the_address_that_the_ranks_use_alone(
    local_size: int, master: str | None, expected: str
) -> None:
    own = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size)}
    own |= {} if master is None else {"MASTER_ADDR": master}
    assert meet(free_port(), [{**own, "OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(2)]) == [expected]


def test_a_store_with_torchruns_variables_at_the_loopback_interface_listens_there_alone() -> None:
    own = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert meet(free_port(), [{**own, "RANK": str(rank)} for rank in range(2)]) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("address", "why"),
    [("192.0.2.1", "Cannot assign requested address"), ("node0", "node0 is 127.0.1.1 on this host")],
    ids=["of another host", "a name of the loopback interface"],
)
def test_an_address_where_no_other_host_could_come_is_refused_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, address: str, why: str
) -> None:
    resolve = socket.getaddrinfo
    if address == "node0":
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: resolve("127.0.1.1", *a, **k))
    place = RankEnvironment("Slurm", 0, 2, 0, 1, address, free_port())
    with pytest.raises(OSError, match=f"rank 0 cannot listen on {address} port .*{why}.*set MASTER_ADDR"):
        open_store(place, None)
