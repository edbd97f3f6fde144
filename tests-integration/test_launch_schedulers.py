"""Real schedulers: Slurm's daemons with munge on a network of their own, and Open MPI's mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from pages import DOCS
from slurm_cluster import Slurm

pytestmark = pytest.mark.soak
SCRIPT = """
import os, torch, torch.distributed as dist, zero_comm, zero_core
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
engine = zero_core.initialize(model=torch.nn.Linear(4, 4), config=config, device="cpu")[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
engine.destroy()
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
who = zero_comm.discover()
line = f"rank {who.rank} of {dist.get_world_size()} total {total.item()} {who.source}\\n"
os.write(1, line.encode())  # in one piece: ranks share a terminal
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    reason = slurm_cluster.why_not()
    if reason is not None:
        pytest.skip(reason)
    with Slurm(tmp_path, nodes=2) as slurm:
        (tmp_path / "ranks.py").write_text(SCRIPT)
        yield slurm


def test_the_written_batch_file_runs_two_nodes_and_srun_alone_starts_ranks_too(slurm: Slurm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zero_launch", "slurm-script", "--nodes", "2", "--nproc", "2", "--name", "job"]
    done = subprocess.run([*command, "ranks.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "job.sh").write_text(done.stdout)
    slurm.run("sbatch", "--wait", "job.sh")
    (output,) = tmp_path.glob("job-*.out")
    lines = [line for line in output.read_text().splitlines() if "] rank " in line]  # torch warns where there is no DNS
    expected = [f"[rank {rank}] rank {rank} of 4 total 10.0 torchrun" for rank in range(4)]
    assert sorted(lines) == expected, output.read_text() + slurm.logs()

    text = slurm.run("srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", sys.executable, "ranks.py").stdout
    assert sorted(line for line in text.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 4 total 10.0 Slurm" for rank in range(4)
    ], text


def test_a_failure_under_slurm_ends_the_job_with_its_status(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        "import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(1000)"
    )
    inner = [sys.executable, "-m", "zero_launch", "--nproc", "1", "ranks.py"]
    done = slurm.run("srun", "--nodes=2", "--ntasks-per-node=1", *inner, seconds=100)
    assert "rank 1 of 2 failed first: exit status 3" in done.stderr, done.stderr
    assert done.returncode == 3, done.stderr


def test_open_mpi_starts_ranks_that_find_each_other(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (Debian: openmpi-bin)")
    (tmp_path / "ranks.py").write_text(SCRIPT)
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    plain = ["mpirun", "--oversubscribe", "-np", "2", sys.executable, "ranks.py"]
    ours = [sys.executable, "-m", "zero_launch", "--launcher", "mpi", "--launcher_args=--oversubscribe"]
    for command in (plain, [*ours, "--nproc", "2", "ranks.py"]):
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
        assert lines == [f"rank {rank} of 2 total 3.0 Open MPI" for rank in range(2)], done.stdout


@pytest.mark.timeout(900)
def test_the_tutorial_works_by_copy_and_paste_on_four_nodes(tmp_path: Path) -> None:
    reason = slurm_cluster.why_not()
    if reason is not None:
        pytest.skip(reason)
    done = slurm_cluster.run_page(DOCS / "tutorials" / "slurm.md", tmp_path)
    assert done.returncode == 0 and "5 blocks of commands ran" in done.stdout, done.stdout + done.stderr
