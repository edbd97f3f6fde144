"""The end of a job that succeeded: the launcher and its ranks end with status 0, every time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Forked from one process that has imported everything, a start takes a tenth of a second, and each child finalizes its
# interpreter as a command of its own does.
STARTS = """
import collections, json, os, random, sys
import zero_launch
import torch.distributed.elastic.agent.server.local_elastic_agent
import zero_launch.agent, zero_launch.local_rendezvous
count, lanes = int(sys.argv[1]), 4
counts, running = collections.Counter(), set()

def reap():
    pid, status = os.wait()
    running.discard(pid)
    counts[os.waitstatus_to_exitcode(status)] += 1

for number in range(count):
    if len(running) == lanes:
        reap()
    pid = os.fork()
    if pid == 0:
        # The time is drawn, so that the end meets every phase of the threads that the launcher has.
        seconds = str(random.random() * 0.3)
        sys.exit(zero_launch.main(["-q", "--nproc", "1", "--no_python", "sleep", seconds]))
    running.add(pid)
while running:
    reap()
print(json.dumps(counts))
"""
ENDS = {
    "nothing": "",
    "destroy": "dist.destroy_process_group()",
    "exit": "sys.exit(0)",
    "destroy and exit": "dist.destroy_process_group(); sys.exit(0)",
}
GROUP = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
groups = [dist.new_group([0, 1]) for _ in range(3)]
for group in groups:
    dist.all_reduce(torch.ones(8), group=group)
"""


def starts(folder, count: int) -> dict[str, int]:
    """How often each exit status came, of so many launchers of a job that succeeds."""
    env = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", STARTS, str(count)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr, done.stderr
    return json.loads(done.stdout)


@pytest.mark.soak
def test_of_a_thousand_launchers_none_aborts_at_its_end(tmp_path):
    counts = starts(tmp_path, int(os.environ.get("ZERO_STARTS", "1000")))
    print(counts)
    assert list(counts) == ["0"]


@pytest.mark.soak
@pytest.mark.parametrize("end", ENDS)
def test_of_fifty_jobs_with_process_groups_none_aborts_at_its_end(run, write_script, end):
    script = write_script(GROUP + ENDS[end])
    counts: dict[int, int] = {}
    for _ in range(int(os.environ.get("ZERO_JOBS", "50"))):
        done = run("-q", "--nproc", 2, script)
        counts[done.returncode] = counts.get(done.returncode, 0) + 1
        assert done.returncode == 0, done.stderr
    print(end, counts)
