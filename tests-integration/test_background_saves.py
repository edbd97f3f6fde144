"""A checkpoint that is written in the background holds the state at its call, whatever the script does after it."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from background_save_cases import TIERS, attack, differences_after_unseen_writes, refusal_of_traced_write

from zero_ckpt import open_checkpoint
from zero_comm import run_ranks

DELAYED = {"offload": {"delayed_update": True}}
COPIES = ["writes_copied_states", "writes_states_of_copy", "reads_all_states"]
EDITS = ["writes_in_place", "writes_by_data", "assigns_data", "writes_states", "writes_states_by_data", *COPIES]
WHOLE = [
    (world, stage, tier, dtype, changes, [])
    for world, stage, tier, dtype in itertools.product((1, 2), (0, 1, 2, 3), TIERS, ("fp32", "bf16"))
    for changes in ({}, DELAYED)
    if (tier == "device" or stage) and not (changes and tier == "device")
]


@pytest.mark.parametrize(
    ("world_size", "stage", "tier", "dtype", "changes", "names"),
    [
        (2, 0, "device", "bf16", {}, EDITS),
        (2, 2, "device", "bf16", {}, COPIES),
        (1, 2, "cpu", "bf16", {}, ["parks", "loads", "destroys"]),
        (2, 3, "device", "fp32", {}, ["writes_in_place", "loads", "parks"]),
        (1, 3, "nvme", "fp32", {}, ["trains", "writes_states"]),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in WHOLE),
    ],
)
def test_the_checkpoint_holds_the_state_at_the_call(
    world_size: int, stage: int, tier: str, dtype: str, changes: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    assert run_ranks(attack, world_size, str(tmp_path), stage, tier, dtype, changes, names)[0] == []


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.soak) for stage in (1, 2, 3))])
def test_masters_follow_writes_without_a_trace_as_in_a_save_at_once(stage: int, tmp_path: Path) -> None:
    assert run_ranks(differences_after_unseen_writes, 2, str(tmp_path), stage) == [[], []]


@pytest.mark.parametrize("what", ["exp_avg", "master"])
def test_a_write_to_what_was_taken_before_the_save_fails_it_by_name(what: str, tmp_path: Path) -> None:
    for said in run_ranks(refusal_of_traced_write, 2, str(tmp_path), what):
        assert f"({what}) was written before it was copied" in said and "rank 0" in said and "rank 1" in said
    assert not (tmp_path / "torn").exists() and open_checkpoint(tmp_path).tag == "good"


ENDS = {
    "exit": ("sys.exit(3)", 3),
    "error": ('raise RuntimeError("of the user")', 1),
    "groups": ("dist.destroy_process_group(); sys.exit(3)", 3),
    "falls off": ("", 0),
}


@pytest.mark.soak
@pytest.mark.parametrize("how", ENDS)
def test_a_script_that_ends_right_after_the_call_leaves_a_whole_checkpoint_or_none(how: str, tmp_path: Path) -> None:
    ending, status = ENDS[how]
    script = tmp_path / "train.py"
    body = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch.distributed as dist
        from background_save_cases import start, step
        engine = start(Path({str(tmp_path)!r}), 2, "device", "bf16", {{}})
        step(engine)
        engine.save_checkpoint({str(tmp_path / "out")!r}, tag="t")
        {ending}
        """
    script.write_text(textwrap.dedent(body))
    words = [sys.executable, "-m", "zero_launch", "--nproc", "2", "--grace", "20", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    if how == "error":
        return  # the other rank may be gone before its part is written
    found = open_checkpoint(tmp_path / "out", "t")
    for name, kind in found.tensors:
        found.read(name, kind)
