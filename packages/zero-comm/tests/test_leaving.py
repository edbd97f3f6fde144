"""Process groups that nobody closed are given back while the interpreter is still whole."""

from __future__ import annotations

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
