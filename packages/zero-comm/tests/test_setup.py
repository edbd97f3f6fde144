"""`init` with and without a launcher, in fresh processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from comm_ranks import own_lines

ALONE = """
import os, threading
before = dict(os.environ)
import torch, torch.distributed as dist, zero_comm
zero_comm.init("cpu")
group = dist.distributed_c10d._get_default_group()
zero_comm.init("cpu")                                  # a second call changes nothing
assert dist.distributed_c10d._get_default_group() is group
assert dist.get_world_size() == 1 and dist.get_rank() == 0 and dist.get_backend() == "gloo"
assert dict(os.environ) == before
out = torch.empty(3)
groups = zero_comm.Mesh(device=torch.device("cpu")).open_groups()
groups.gather.all_gather(out, torch.ones(3), zero_comm.Tag("gather", "u")).wait()
assert out.tolist() == [1.0] * 3
dist.destroy_process_group()
print("ok")
"""

LAUNCHED = """
import torch, torch.distributed as dist, zero_comm
zero_comm.init("cpu")
groups = zero_comm.Mesh(device=torch.device("cpu")).open_groups()
out = torch.empty(2)
groups.gather.all_gather(out, torch.tensor([float(dist.get_rank())]), zero_comm.Tag("gather", "u")).wait()
dist.destroy_process_group()
print(out.tolist())
"""

LATE = """
import os, time, torch.distributed as dist, zero_comm
connect = dist.init_process_group
def slowly(*args, **kwargs):
    connect(*args, **kwargs)
    time.sleep(float(os.environ["RANK"]))              # rank 1's connections take a second longer
dist.init_process_group = slowly
zero_comm.init("cpu")
print(time.time())
os._exit(0)
"""


WAITING = """
import sys, threading, torch.distributed as dist, zero_comm
from zero_comm import arriving
assert arriving._SPEAK_AFTER_SECONDS == 5.0
arriving._SPEAK_AFTER_SECONDS = 0.5
print("imported", flush=True)
sys.stdin.readline()
zero_comm.init("cpu")
assert threading.active_count() == 1, threading.enumerate()
dist.destroy_process_group()
"""


def environment(**more: str) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {**{k: v for k, v in os.environ.items() if k not in names}, "OMP_NUM_THREADS": "1", **more}


def test_without_a_launcher_one_rank_is_made_and_no_variable_changes() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and own_lines(done.stdout) == ["ok"], done.stderr


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def start(
    program: str, rank: int, port: str, world_size: int = 2, *, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    """Start ``program`` as a rank with the variables that users set by hand."""
    size = str(world_size)
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment(RANK=str(rank), WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_pair(program: str) -> list[list[str]]:
    """Run ``program`` as ranks 0 and 1, and return the lines that each printed."""
    port = free_port()
    ranks = [start(program, rank, port) for rank in range(2)]
    answers = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], answers
    return [own_lines(out) for out, _ in answers]


def test_a_launchers_variables_are_followed() -> None:
    assert run_pair(LAUNCHED) == [["[0.0, 1.0]"]] * 2


def test_no_rank_returns_before_all_are_connected() -> None:
    (first,), (second,) = run_pair(LATE)
    assert abs(float(first) - float(second)) < 0.5


@pytest.mark.parametrize(
    ("first", "waits_for"),
    [
        ([0], "waiting for 1 of 2 ranks at 127.0.0.1:{port}: rank 1 has not come"),
        ([1], "{one} is waiting for rank 0 of 2 ranks at 127.0.0.1:{port}, where nothing answers (Connection refused)"),
        ([0, 1], "waiting for 2 of 4 ranks at 127.0.0.1:{port}: ranks 2, 3 have not come"),
    ],
)
def test_ranks_that_wait_for_others_say_so_once(first: list[int], waits_for: str) -> None:
    port, world_size = free_port(), 2 * len(first)
    ranks = {rank: start(WAITING, rank, port, world_size, stdin=subprocess.PIPE) for rank in first}
    try:
        for process in ranks.values():  # the last one may begin to wait seconds after the first could
            assert process.stdout is not None and process.stdout.readline() == "imported\n"
        for process in reversed(ranks.values()):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        stream = ranks[first[0]].stderr
        assert stream is not None
        said = next(line.strip() for line in stream if "waiting for" in line)
        assert said == waits_for.format(port=port, one="rank 1")
        ranks |= {rank: start(WAITING, rank, port, world_size) for rank in range(world_size) if rank not in first}
        told = {rank: process.communicate(timeout=60)[1] for rank, process in ranks.items()}
        assert [process.returncode for process in ranks.values()] == [0] * world_size, told
        assert said not in "".join(told.values()), told
    finally:
        for process in ranks.values():
            process.kill()
            process.wait()


def test_a_rank_that_nobody_joins_ends_with_the_missing_named() -> None:
    port = free_port()
    program = "import datetime, zero_comm; zero_comm.init('cpu', timeout=datetime.timedelta(seconds=1))"
    _, error = start(program, 0, port).communicate(timeout=60)
    assert f"rank 0 waited 1 s for 1 of 2 ranks at 127.0.0.1:{port}: rank 1 has not come" in error, error
