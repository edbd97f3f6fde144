"""Messages at agreement points: everyone hears everyone, and disagreement is said by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from comm_ranks import engine_groups, failure_of

from zero_comm import CommError, Message, run_ranks
from zero_comm.failure_notes import FailureNotes

SIZES = [0, 50, 85, 2_000]  # characters of two bytes: inside one frame, about as long as it, and several


def payload(rank: int, size: int) -> dict[str, object]:
    return {"rank": rank, "text": "é" * (size * (rank + 1)), "flags": [True, None, 1.5]}


def agree_on_all() -> list[list[object]]:
    control = engine_groups().control
    return [control.agree(Message("point", f"n{size}", size, payload(control.rank, size))) for size in SIZES]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_every_payload_whatever_its_size(world_size: int) -> None:
    expected = [[payload(rank, size) for rank in range(world_size)] for size in SIZES]
    assert run_ranks(agree_on_all, world_size) == [expected] * world_size


def every_length_around_the_frame() -> bool:
    control = engine_groups().control
    for length in range(440, 540):
        body = "x" * (length if control.rank == 0 else 10)
        if control.agree(Message("m", "", 0, body))[0] != "x" * length:
            return False
    return True


def test_messages_just_below_and_above_one_frame_arrive_whole() -> None:
    assert run_ranks(every_length_around_the_frame, 2) == [True, True]


def disagree() -> str:
    control = engine_groups().control
    kind = "forward" if control.rank != 1 else "step"
    return failure_of(control.agree, Message(kind, "model", control.rank, None))


def test_ranks_at_different_calls_get_a_listing_of_what_each_one_did() -> None:
    for text in run_ranks(disagree, 3):
        assert text.startswith("DesyncError: the ranks are at different calls:")
        for line in (
            "rank 0: forward 'model' in step 0",
            "rank 1: step 'model' in step 1",
            "rank 2: forward 'model' in step 2",
        ):
            assert line in text


def agree_without_numpy() -> list[list[object]]:
    with pytest.raises(RuntimeError, match="Numpy is not available"):
        torch.zeros(1).numpy()
    return agree_on_all()


@pytest.mark.parametrize("world_size", [2, 17])
def test_messages_do_not_need_numpy(world_size: int, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(name='numpy')\n")
    code = f"""
from test_control import SIZES, agree_without_numpy, payload
from zero_comm import run_ranks

if __name__ == "__main__":
    expected = [[payload(rank, size) for rank in range({world_size})] for size in SIZES]
    assert run_ranks(agree_without_numpy, {world_size}) == [expected] * {world_size}
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    paths = [str(tmp_path), str(Path(__file__).parent), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def use_when_closed() -> list[str]:
    groups = engine_groups()
    message = Message("forward", "model", 0)
    groups.close()
    found = [failure_of(groups.control.exchange, message), failure_of(lambda: groups.control.process_group)]
    dist.barrier()  # the default group is as it was
    return found


def test_a_closed_control_refuses_to_exchange_over_the_default_group() -> None:
    for rank, (exchange, group) in enumerate(run_ranks(use_when_closed, 2)):
        closed = f"the control group of rank {rank} of 2 is closed"
        assert exchange == f"CommError: forward 'model' in step 0: {closed}"
        assert group == f"CommError: its process group: {closed}"


STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_note_may_outlive_the_store_that_keeps_it() -> None:
    with subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        notes = FailureNotes(dist.TCPStore("127.0.0.1", int(keeper.stdout.readline())), "group", 1, 2)
        notes.leave("left")
    assert keeper.returncode == 0
    notes.withdraw()
    error = CommError("a peer is gone")
    assert notes.explain(error) is error
