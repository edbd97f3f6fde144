"""A rank ends with its script's own status, also when a thread of gloo's waits for the interpreter's lock just then."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# The rank holds the interpreter's lock from before the collective's end to its own, so that the thread that drops the
# tensor of the collective waits for the lock when the interpreter begins to be taken down.
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], 2), rank=rank, world_size=2)
kept = dist.new_group([0, 1])
dist.all_reduce(torch.ones(8), group=kept)
"""
COLLECTIVE = """
dist.barrier()
sys.setswitchinterval(0.5)
dist.all_reduce(torch.ones(8), async_op=True, group={group})
until = time.perf_counter() + 0.1
while time.perf_counter() < until:
    pass
"""
CAUGHT = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
caught = 0
for _ in range(3):
    try:
        dist.all_reduce(torch.ones(8))
    except RuntimeError:
        caught += 1
assert caught
"""
LAST, KEPT = COLLECTIVE.format(group="None"), COLLECTIVE.format(group="kept")
EXCEPTION = """
import atexit
atexit.register(lambda: type(sys.last_value) is ValueError or os._exit(9))
sys.excepthook = lambda *_: None  # writing would leave the lock to the thread
raise ValueError("bad batch")
"""
PEER_DIED = CAUGHT + LAST.replace("dist.barrier()", "")
ENDS = {
    "nothing": (LAST, [0, 0]),
    "sys.exit": (LAST + "sys.exit(3)", [3, 3]),
    "exception": (LAST + EXCEPTION, [1, 1]),
    "groups destroyed, one kept": (KEPT + "dist.destroy_process_group()", [0, 0]),
    "caught": (PEER_DIED, [0, -9]),
    "caught, then sys.exit": (PEER_DIED + "sys.exit(3)", [3, -9]),
}
# Forked from one process that has imported torch, each rank finalizes its interpreter as a command of its own does.
NURSERY = """
import json, os, sys
import torch, torch.distributed
from zero_launch import rank

folder, count, scripts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
ended, child = {}, False
for number in range(count):
    for name, text in scripts.items():
        path = f"{folder}/{name}.py"
        with open(path, "w") as file:
            file.write(text)
        pids = []
        for index in range(2):
            pid = os.fork()
            child = not pid
            if child:
                os.environ.update(RANK=str(index), STORE=f"{folder}/{name}.{number}")
                sys.argv = ["rank", "script", path]
                break
            pids.append(pid)
        if child:
            break
        statuses = str([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
        ended.setdefault(name, {}).setdefault(statuses, 0)
        ended[name][statuses] += 1
    if child:
        break
if child:
    rank.main()
else:
    print(json.dumps(ended))
"""


def statuses(folder, scripts: dict[str, str], count: int) -> dict[str, dict[str, int]]:
    """How often which statuses of two ranks came, for each script."""
    texts = json.dumps({name: SCRIPT + text for name, text in scripts.items()})
    command = [sys.executable, "-W", "ignore", "-c", NURSERY, str(folder), str(count), texts]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def wrong_ends(folder, names, count: int) -> dict[str, dict[str, int]]:
    ended = statuses(folder, {name: ENDS[name][0] for name in names}, count)
    return {name: found for name, found in ended.items() if found != {str(ENDS[name][1]): count}}


def test_a_rank_ends_with_its_status_although_a_thread_waits_for_the_interpreter(tmp_path):
    assert wrong_ends(tmp_path, ["nothing", "exception", "caught, then sys.exit"], 1) == {}


@pytest.mark.soak
def test_ranks_end_with_their_status_although_threads_wait_for_the_interpreter(tmp_path):
    assert wrong_ends(tmp_path, ENDS, 5) == {}


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_of_a_thousand_ranks_that_catch_the_death_of_a_peer_none_aborts_at_its_end(tmp_path):
    count = int(os.environ.get("ZERO_STARTS", "1000"))
    ends = {"": [0, -9], "sys.exit(3)": [3, -9], "dist.destroy_process_group()": [0, -9], "raise ValueError": [1, -9]}
    ended = statuses(tmp_path, {end: CAUGHT + end for end in ends}, -(-count // len(ends)))
    print(ended)
    assert {end: list(found) for end, found in ended.items()} == {end: [str(ends[end])] for end in ends}


@pytest.mark.parametrize("ends_by", ["sys.exit(5)", "raise KeyError('of the child')", "print('the child is through')"])
def test_how_a_forked_child_ends_is_not_how_its_rank_ends(write_script, run, ends_by):
    script = write_script(f"""
        import os, sys
        child = os.fork()
        if child == 0:
            {ends_by}
        else:
            os.waitpid(child, 0)
            print("left", sorted(os.listdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))))
    """)
    done = run("--nproc", "1", script)
    assert done.returncode == 0, done.stderr
    (left,) = (line for line in done.stdout.splitlines() if "left [" in line)
    assert "end.json" not in left and "error.json" not in left, left
