"""The launcher with ranks that use the other packages: why they hang, and what a job on several hosts trains."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAINING = Path(__file__).with_name("_launch_training.py")
EXPLAINED_SECONDS = 5
# The same three divergences without an engine around them: a stall, and two mismatches.
GROUPS = """
import os, sys, time, torch, torch.distributed as dist, zero_comm
from zero_comm import Tag
zero_comm.init("cpu")
groups, rank = zero_comm.Mesh(device=torch.device("cpu")).open_groups(), dist.get_rank()
def gather(name, size=64):
    world = dist.get_world_size()
    groups.gather.all_gather(torch.empty(world * size), torch.zeros(size), Tag("gather", name, 3)).wait()
for layer in range(3):
    gather(f"layers.{layer}.weight")
open(f"diverged{rank}", "w").close()
how = sys.argv[1]
if how == "extra" and rank == 1:
    gather("extra.weight")
if how == "skip" and rank != 1:
    gather("layers.3.weight")
gather("layers.4.weight", 32 if how == "shape" and rank == 1 else 64)
flat = torch.zeros(64 * dist.get_world_size())
groups.reduce.reduce_scatter(flat, torch.zeros(64), Tag("reduce", "layers.4.weight", 3)).wait()
groups.control.exchange(zero_comm.Message("step", "engine", 3))
gather("layers.5.weight")
"""
EXPLANATIONS = {
    "extra": ("layers.4.weight' in step 3, 512 bytes", "extra.weight' in step 3, 512 bytes"),
    "skip": ("layers.3.weight' in step 3, 512 bytes", "layers.4.weight' in step 3, 512 bytes"),
    "shape": ("layers.4.weight' in step 3, 512 bytes", "layers.4.weight' in step 3, 256 bytes"),
}


def said(how: str, text: str) -> bool:
    """Return whether a report says what each of the two ranks asked for."""
    return all(f"rank {rank}: gather of '{words}" in text for rank, words in enumerate(EXPLANATIONS[how]))


def launch(folder: Path, *arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "zero_launch", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=200)
    return done.returncode, done.stdout, done.stderr


def explained(folder: Path, *arguments: object) -> tuple[float, str]:
    """Run a job that diverges: how long after that the explanation came, and the whole report."""
    command = [sys.executable, "-m", "zero_launch", *map(str, arguments)]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder)
    text, seconds = "", float("inf")
    for line in job.stderr or ():
        text += line
        first = seconds == float("inf")
        if first and line.startswith(("zero-launch: the ranks ask", "zero-launch: every rank waits")):
            seconds = time.time() - min(path.stat().st_mtime for path in folder.glob("diverged*"))
    assert job.wait(30) != 0, text
    return seconds, text


LIVES_ON = """
import sys, time, torch, torch.distributed as dist, zero_core
def fail(*_):
    raise ArithmeticError("no luck")
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine = zero_core.initialize(model=model, config={**config, "zero_optimization": {"stage": int(sys.argv[1])}})[0]
try:
    output = engine(torch.ones(1, 4))
    if dist.get_rank() == 1:
        output.register_hook(fail)
    engine.backward(output.sum())
    engine.step()
except Exception as error:
    print(type(error).__name__)
    if dist.get_rank() == 1:
        time.sleep(8)
print("has cleaned up")
"""


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_rank_that_failed_and_waits_for_nobody_has_its_time_to_clean_up(tmp_path: Path, stage: int) -> None:
    (tmp_path / "train.py").write_text(LIVES_ON)
    status, out, err = launch(tmp_path, "--nproc", 2, "train.py", stage)
    assert status == 0 and "waits in" not in err, err
    assert "[rank 1] ArithmeticError" in out and "[rank 1] has cleaned up" in out, out


@pytest.mark.parametrize("how", ["extra", *(pytest.param(how, marks=pytest.mark.soak) for how in ("skip", "shape"))])
def test_a_divergence_is_explained_by_rank_and_name(tmp_path: Path, how: str) -> None:
    (tmp_path / "groups.py").write_text(GROUPS)
    seconds, text = explained(tmp_path, "--nproc", 2, "groups.py", how)
    assert seconds < float("inf"), text  # how soon, the soak says
    assert said(how, text), text
    assert "at groups.py:" in text


@pytest.mark.soak
@pytest.mark.parametrize("how", EXPLANATIONS)
def test_a_divergence_between_hosts_is_explained_too(tmp_path: Path, how: str) -> None:
    (tmp_path / "groups.py").write_text(GROUPS)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    seconds, text = explained(tmp_path, "--hostfile", "hosts", "--launcher", "local", "groups.py", how)
    assert seconds < EXPLAINED_SECONDS, (seconds, text)
    assert said(how, text), text


@pytest.mark.soak
@pytest.mark.parametrize("how", ["extra", "skip", "shape"])
def test_a_divergence_inside_a_stage_3_training_is_explained_by_parameter(tmp_path: Path, how: str) -> None:
    status, _, err = launch(tmp_path, "--nproc", 2, TRAINING, 6, "-", how)
    report = err[max(err.find("zero-launch: the ranks ask"), err.find("zero-launch: every rank waits")) :]
    assert status != 0
    names = {"extra": "decoder.extra.weight", "skip": "decoder.1.weight", "shape": "decoder.norm.weight"}
    assert f"gather of '{names[how]}' in step 3" in report and "_launch_training.py:" in report, err


@pytest.mark.parametrize("hosts", [False, True], ids=["one machine", "two hosts"])
@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_well_while_another_waits_for_it_ends_an_elastic_job(
    tmp_path: Path, end: str, hosts: bool
) -> None:
    leaves = (
        GROUPS.partition("if how ==")[0]
        + f"""
if rank == 1:
    {end}
gather("layers.3.weight")
"""
    )
    script = tmp_path / "leaves.py"
    script.write_text(leaves)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    words = ["--hostfile", "hosts", "--launcher", "local"] if hosts else ["--nproc", 2]
    code, _, errors = launch(tmp_path, *words, "--elastic", "2:2", "--restarts", 2, script, "")
    assert code == 1
    found = r"rank 1 ended with exit status 0 while others wait for it:\n  rank 0 wait(s|ed) in gather of 'layers\.3"
    assert re.search(found, errors), errors
    assert "restart 1 of 2" not in errors


@pytest.mark.soak
def test_a_job_on_several_hosts_restarts_and_passes_its_status_on(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=2\n")
    (tmp_path / "job.py").write_text(
        "import os, sys, time\n"
        "rank, attempt = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('rank', rank, 'of', os.environ['WORLD_SIZE'], 'local', os.environ['LOCAL_RANK'], attempt, flush=True)\n"
        "open(f'came{attempt}.{rank}', 'w').close()\n"
        "while rank == '2':\n"
        "    if all(os.path.exists(f'came{attempt}.{other}') for other in '01'): sys.exit(4 + int(attempt))\n"
        "    time.sleep(0.01)\n"
        "time.sleep(60)\n"
    )
    options = ["--hostfile", "hosts", "--launcher", "local", "--max_restarts", 1, "--grace", 1]
    status, out, err = launch(tmp_path, *options, "job.py")
    assert sorted(out.splitlines()) == sorted(
        f"[rank {rank}] rank {rank} of 3 local {local} {attempt}"
        for attempt in (0, 1)
        for rank, local in ((0, 0), (1, 0), (2, 1))
    )
    assert "rank 2 of 3 failed first: exit status 4" in err and "restart 1 of 1" in err
    assert "rank 2 of 3 failed first: exit status 5" in err and "  on b, pid" in err
    assert status == 5
