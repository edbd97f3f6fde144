"""Real schedulers: Slurm's daemons with munge on this machine, and Open MPI's mpirun."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_hosts import wait_until
from pages import DOCS, run_page

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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Slurm:
    """slurmctld, ``nodes`` slurmd and munged with everything of theirs in one folder."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self._nodes = nodes
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if (self.folder / "n1.log").exists():  # steps outlive slurmd
            self.run("scancel", "--full", "--user", "root")
            self.run("scancel", "--full", "--signal=KILL", "--user", "root")
            wait_until(lambda: not self.run("squeue", "-h").strip(), 30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self) -> None:
        folder, host = self.folder, socket.gethostname()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (folder / "state").mkdir()
        ports = [free_port() for _ in range(1 + self._nodes)]
        names = f"n[1-{self._nodes}]"
        (folder / "slurm.conf").write_text(
            f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={ports[0]}\n"
            f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.sock\nSlurmUser=root\nSlurmdUser=root\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\n"
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd-%n.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nReturnToService=2\n"
            "SelectType=select/cons_tres\nMailProg=/bin/true\nJobAcctGatherType=jobacct_gather/none\n"
            "AccountingStorageType=accounting_storage/none\nSlurmdParameters=config_overrides\n"
            f"NodeName={names} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{','.join(map(str, ports[1:]))}] CPUs=4\n"
            "PartitionName=test Nodes=ALL Default=YES MaxTime=5 State=UP\n"
        )
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock"]
        munged += [
            f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log",
            f"--seed-file={folder}/munge.seed",
        ]
        self._daemon("munged", munged)
        assert wait_until((folder / "munge.sock").exists, 10), (folder / "munged.log").read_text()
        self._daemon("slurmctld", ["slurmctld", "-D"])
        for number in range(self._nodes):
            self._daemon(f"n{number + 1}", ["slurmd", "-D", "-N", f"n{number + 1}"])
        assert wait_until(lambda: f"idle {names}" in self.run("sinfo", "-h", "-o", "%t %N"), 30), self.logs()

    def _daemon(self, name: str, command: list[str]) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        self._daemons.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.folder))

    def run(self, *command: object, seconds: float = 120) -> str:
        words = list(map(str, command))
        done = subprocess.run(words, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=seconds)
        return done.stdout + done.stderr

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))


def slurm_of(folder: Path, nodes: int) -> Slurm:
    """Return a Slurm that has not started yet; skip the test where its programs are missing."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'} (Debian: slurm-wlm, munge)")
    return Slurm(folder, nodes)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with slurm_of(tmp_path, nodes=2) as slurm:
        (tmp_path / "ranks.py").write_text(SCRIPT)
        yield slurm


def test_the_written_batch_file_runs_two_nodes_and_srun_alone_starts_ranks_too(slurm: Slurm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zero_launch", "slurm-script", "--nodes", "2", "--nproc", "2", "--name", "job"]
    done = subprocess.run([*command, "ranks.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "job.sh").write_text(done.stdout)
    slurm.run("sbatch", "--wait", "job.sh")
    (output,) = tmp_path.glob("job-*.out")
    lines = [line for line in output.read_text().splitlines() if line.startswith("[rank")]
    expected = [f"[rank {rank}] rank {rank} of 4 total 10.0 torchrun" for rank in range(4)]
    assert sorted(lines) == expected, output.read_text() + slurm.logs()

    text = slurm.run("srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", sys.executable, "ranks.py")
    assert sorted(line for line in text.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 4 total 10.0 Slurm" for rank in range(4)
    ], text


def test_a_failure_under_slurm_ends_the_job_with_its_status(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        "import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(100)"
    )
    begin = time.monotonic()
    command = [
        "srun",
        "--nodes=2",
        "--ntasks-per-node=1",
        sys.executable,
        "-m",
        "zero_launch",
        "--nproc",
        "1",
        "ranks.py",
    ]
    done = subprocess.run(command, env=slurm.env, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "rank 1 of 2 failed first: exit status 3" in done.stderr, done.stderr
    assert done.returncode == 3, done.stderr
    assert time.monotonic() - begin < 60


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


@pytest.mark.timeout(600)
def test_the_tutorial_works_by_copy_and_paste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "work").mkdir()
    with slurm_of(tmp_path / "slurm", nodes=4) as slurm:
        monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
        monkeypatch.setenv("MASTER_ADDR", slurm.env["MASTER_ADDR"])
        try:
            assert run_page(DOCS / "tutorials" / "slurm.md", tmp_path / "work") == 5
        except AssertionError:
            print(slurm.logs())
            raise
