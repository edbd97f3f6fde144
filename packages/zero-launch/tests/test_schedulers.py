from __future__ import annotations

import subprocess
import sys

import pytest

from zero_launch import Hostfile, LaunchSpec
from zero_launch.nodes import Node, discover_node
from zero_launch.schedulers import mpirun_command, srun_command

SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "12",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "MASTER_ADDR": "n1",
}


def test_one_launcher_per_node_finds_its_node():
    node = discover_node(SLURM)
    assert node is not None and (node.source, node.rank, node.nodes, node.address) == ("Slurm", 1, 2, "n1")
    assert node.port == discover_node({**SLURM, "SLURM_NODEID": "0"}).port
    pod = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-0", "PET_MASTER_PORT": "23456"}
    assert discover_node(pod) == Node("Kubernetes", 2, 4, "job-0", 23456)


@pytest.mark.parametrize(
    "environ",
    [{}, {**SLURM, "SLURM_STEP_NUM_NODES": "1"}, {**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, {"PET_NNODES": "1:4"}],
)
def test_without_several_nodes_there_is_nothing_to_find(environ):
    assert discover_node(environ) is None


def test_the_command_lines_of_srun_and_mpirun():
    spec = LaunchSpec("train.py", ("--lr", "1"), nproc=2)
    assert srun_command(spec, 4, ["--nproc", "2"], ["-p", "gpu"]) == [
        *("srun", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "-p", "gpu"),
        *(sys.executable, "-m", "zero_launch", "--nproc", "2", "train.py", "--lr", "1"),
    ]
    hosts = Hostfile({"a": (0, 1), "b": (0,)})
    assert mpirun_command(spec, hosts, None, {"FOO": "bar"}, ["--oversubscribe"]) == [
        *("mpirun", "-np", "3", "--host", "a:2,b:1", "-x", "FOO", "-x", "MASTER_ADDR=a", "--oversubscribe"),
        *(sys.executable, "train.py", "--lr", "1"),
    ]


def test_the_batch_file_is_a_shell_script_that_bash_accepts(tmp_path):
    (tmp_path / "my train.py").write_text("")
    command = [sys.executable, "-m", "zero_launch", "slurm-script", "--nodes", "2", "--nproc", "8", "--gpus"]
    command += ["--time", "01:00:00", "--requeue", "90", "--options=--max_restarts 1", "my train.py", "--name", "a b"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=01:00:00",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR1@90",
    ):
        assert line in done.stdout.splitlines()
    assert "--nproc 8 --requeue --max_restarts 1" in done.stdout and "'my train.py' --name 'a b'" in done.stdout
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
