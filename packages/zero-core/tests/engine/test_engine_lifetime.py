"""An engine that nobody holds any more leaves nothing behind, destroyed or not."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_core
from zero_comm import run_ranks
from zero_offload import malloc
from zero_partition import PartitionError


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_and_a_model_that_nobody_holds_are_collected(stage: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    engine, optimizer, _, _ = zero_core.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    remaining = [weakref.ref(engine), weakref.ref(model), weakref.ref(optimizer)]
    del engine, model, optimizer
    gc.collect()
    assert [reference() for reference in remaining] == [None, None, None]


def uses_after_destroy(stage: int) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    engine.destroy()
    model(torch.ones(2, 8)).sum().backward()
    said = []
    for use in (optimizer.step, lambda: zero_core.initialize(model=model, optimizer=optimizer, config=config)):
        with pytest.raises(PartitionError) as refusal:
            use()
        said.append(str(refusal.value))
    torch.optim.Adam(model.parameters()).step()
    return said


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (1, 2), (3, 3)])
def test_the_optimizer_of_a_destroyed_engine_is_refused_by_name(stage: int, world_size: int) -> None:
    for step, again in run_ranks(uses_after_destroy, world_size, stage):
        assert "after engine.destroy()" in step and "'0.weight'" in step + again
        assert "engine stepped that is destroyed" in again and "Build a new optimizer" in again


def test_free_memory_is_returned_once_activations_have_freed_theirs(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activations = {"device": "nvme", "nvme_path": str(tmp_path), "min_bytes": 1}
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "keep_freed_memory": True,
        "offload": {"activations": activations},
    }
    engine = zero_core.initialize(model=nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), config=config)[0]
    engine.backward(engine(torch.ones(64, 8)).sum())
    engine.step()
    assert list(tmp_path.iterdir())
    left: list[list[Path]] = []
    give_back = malloc.return_free_memory
    monkeypatch.setattr(malloc, "return_free_memory", lambda: (left.append(list(tmp_path.iterdir())), give_back()))
    engine.destroy()
    malloc.keep_freed_memory(False)
    assert [[path for path in paths if path.suffix != ".lock"] for paths in left] == [[]]


FORKS = """
import os, signal, sys
import torch
import zero_core

config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
engine = zero_core.initialize(model=torch.nn.Linear(8, 8), config=config)[0]
for state in ("open", "destroyed"):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it where it would hang
        sys.exit(3)
    print(state, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    engine.destroy()
"""


def test_a_forked_process_ends_by_itself_though_it_has_no_thread_of_the_engines_groups() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()[-4:]) == (0, ["open", "3", "destroyed", "3"]), done.stderr


FORKS_ON_RANKS = """
import os, signal, sys
import torch
import torch.distributed as dist
import zero_core
from zero_core.errors import UsageError

folder = sys.argv[1]
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
    "checkpoint": {"writer": {"decoupled": True}},
}
engine = zero_core.initialize(model=torch.nn.Linear(8, 8), config=config)[0]
mine = dist.new_group([0, 1])  # as a script makes its own
said = []
for state in ("open", "destroyed"):
    if state == "open":
        engine.save_checkpoint(folder)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends it where it would hang
        if state == "open":
            try:
                engine.save_checkpoint(folder)
            except UsageError as error:
                print(error, flush=True)
        engine.destroy()
        sys.exit(3)
    said.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    engine.destroy()
told = [None, None]
dist.all_gather_object(told, said)
print(told, flush=True)
"""


def test_forked_processes_of_two_ranks_end_by_themselves_and_take_no_part(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS_ON_RANKS)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, str(script), str(tmp_path / "saved")]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **where, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    for text in said:
        assert "engine.save_checkpoint: this process was forked from the engine's; call it there" in text, text
        assert "[[3, 3], [3, 3]]" in text, text
    assert [rank.returncode for rank in ranks] == [0, 0]
