"""However a script ends, its ranks' processes end with its status, and not by an abort."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection

import pytest

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import zero_core

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
config = {{
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}},
    "zero_optimization": {{"stage": {stage}, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1}},
}}
engine = zero_core.initialize(model=model, config=config)[0]
for _ in range(2):
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
{ending}
"""

ENDINGS = {
    "neither": ("", 0),
    "destroy": ("engine.destroy()", 0),
    "groups before the engine": ("dist.destroy_process_group()\nengine.destroy()", 0),
    "groups alone": ("dist.destroy_process_group()", 0),
    "engine, then groups": ("engine.destroy()\ndist.destroy_process_group()", 0),
    "sys.exit": ("sys.exit(3)", 3),
}


def ends(ending: str, stage: int) -> list[tuple[int, str]]:
    """Status and errors of two ranks whose script ends in one of `ENDINGS`."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    script = SCRIPT.format(stage=stage, ending=ENDINGS[ending][0])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script], env={**shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    results = []
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        results.append((rank.returncode, errors))
    return results


@pytest.mark.soak  # a start imports torch and the engine in each rank; forked ones, below, end in the same way
@pytest.mark.parametrize(("ending", "stage"), [("neither", 3), ("groups before the engine", 2), ("sys.exit", 1)])
def test_a_script_ends_with_its_own_status(ending: str, stage: int) -> None:
    for status, errors in ends(ending, stage):
        assert status == ENDINGS[ending][1], errors
        assert "terminate called" not in errors and "Traceback" not in errors, errors


# Forked from one process that has imported everything, each rank finalizes its interpreter as a command of its own.
NURSERY = """
import collections, json, os, socket, sys
import torch, torch._dynamo, torch.distributed, torch.distributed.fsdp, torch.distributed.tensor, zero_core.assembly
count, scripts, statuses = int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
wrong, script = collections.Counter(), None
for number in range(count):
    ending = list(statuses)[number % len(statuses)]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            script = scripts[ending][(number + number // len(statuses)) % 4]
            break
        ranks.append(pid)
    if script is not None:
        break
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    wrong[f"{ending}: {ended}"] += ended != [statuses[ending]] * 2
if script is None:
    print(json.dumps({what: times for what, times in wrong.items() if times}))
else:
    exec(compile(script, "train.py", "exec"))
"""


def wrong_ends(starts: int, endings: Collection[str], *options: str) -> dict[str, int]:
    """Start two ranks so often, with each ending in turn; return how often which statuses were not the script's."""
    scripts = {
        name: [SCRIPT.format(stage=stage, ending=ENDINGS[name][0]) for stage in (3, 2, 1, 0)] for name in endings
    }
    statuses = json.dumps({name: ENDINGS[name][1] for name in endings})
    command = [sys.executable, *options, "-W", "ignore", "-c", NURSERY, str(starts), json.dumps(scripts), statuses]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "terminate called" not in done.stderr and "Fatal Python" not in done.stderr, done.stderr[-3000:]
    assert done.stderr.count("Traceback") == 0, done.stderr[-3000:]
    wrong: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return wrong


def test_ranks_that_are_forked_end_with_the_scripts_own_status() -> None:
    assert wrong_ends(3, ["neither", "groups before the engine", "sys.exit"]) == {}


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("options", [[], ["-X", "dev"]], ids=["", "dev"])
def test_none_of_a_thousand_starts_ends_by_an_abort(options: list[str]) -> None:
    starts = int(os.environ.get("ZERO_STARTS", "1000"))
    wrong = wrong_ends(starts, ENDINGS, *options)
    print(f"{starts} starts of 2 ranks, python {' '.join(options)}: statuses that are not the script's: {wrong}")
    assert wrong == {}
