"""Process groups that nobody closed are given back while the interpreter is still whole."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from comm_ranks import own_lines

SCRIPT = """
import atexit
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from zero_comm import Control, Group

atexit.register(lambda: print([(type(h).__name__, h._process_group) for h in holders]))  # runs last
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
holders = [Group(dist.new_group([0])), Control(dist.new_group([0])), Group(dist.new_group([0]))]
holders[2].close()
if {destroyed}:
    dist.destroy_process_group()
"""


def left_by(script: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    return done.returncode, own_lines(done.stdout)


@pytest.mark.parametrize("destroyed", [True, False])
def test_what_a_script_leaves_open_is_closed_before_the_interpreter_ends(destroyed: bool) -> None:
    status, held = left_by(SCRIPT.format(destroyed=destroyed))
    assert (status, held) == (0, ["[('Group', None), ('Control', None), ('Group', None)]"])


def test_a_script_that_fails_waits_for_nobody() -> None:
    status, held = left_by(SCRIPT.format(destroyed=False) + "raise KeyboardInterrupt")
    assert status != 0 and held[-1].count("ProcessGroup object") == 2


FORKS = """
import os, signal, sys
import torch.distributed as dist
import zero_comm
from zero_comm import EngineGroups, Message

zero_comm.init("cpu")
groups = EngineGroups.open([[0, 1]])
groups.control.agree(Message("step", "", 1))
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends it where it would hang
    sys.exit(3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
statuses = groups.control.agree(Message("step", "", 2, status))
store = groups.control._store
print(statuses, [store.check([f"{groups.control._name} note {rank}"]) for rank in range(2)], flush=True)
groups.control.agree(Message("step", "", 3))
"""


def test_a_child_that_a_rank_forks_ends_by_itself_and_leaves_no_word_for_the_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", FORKS]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **where, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [own_lines(rank.communicate(timeout=100)[0]) for rank in ranks]
    assert said == [["[3, 3] [False, False]"]] * 2 and [rank.returncode for rank in ranks] == [0, 0]
