"""A Slurm cluster on one machine: a front with slurmctld, and nodes with a slurmd each, all on a network of their own.

Every node is a network namespace with an address and a host name, so that a job's ranks meet as they do on machines of
their own. Everything of Slurm's and munge's lies in one folder. Needs root.

`python slurm_cluster.py PAGE FOLDER` runs a page of docs/ from its own text at the front of a cluster of four nodes,
with the interpreter's own environment, which has to have psutil. Where there can be no cluster it says why and passes;
with ZERO_SLURM=required in the environment it fails.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import namespaces
from launch_hosts import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "ip", "unshare")
NETWORK = "10.79.0"
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


def why_not() -> str | None:
    """Why there can be no cluster here; None when there can. Raises RuntimeError instead where there has to be one:
    ZERO_SLURM is "required"."""
    reason = _hindrance()
    if reason is not None and os.environ.get("ZERO_SLURM") == "required":
        raise RuntimeError(f"ZERO_SLURM=required, but there can be no Slurm cluster here: {reason}")
    return reason


def _hindrance() -> str | None:
    """What is missing here for a cluster; None for nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(missing)} here (Debian: slurm-wlm, munge, iproute2)"
    return namespaces.refused()


class Slurm:
    """A cluster of the nodes n1, n2, …, as a context. ``folder``: an empty one."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self._namespaces = {f"n{number}": f"zs{os.getpid()}n{number}" for number in range(1, nodes + 1)}
        self._front = f"zs{os.getpid()}front"
        self._env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        namespaces.remove_stale("zs")
        try:
            namespaces.connect(self._front, self._namespaces, NETWORK)
            self._configure()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if (self.folder / "n1.log").exists():  # steps outlive slurmd
            self.run("scancel", "--full", "--user", "root")
            self.run("scancel", "--full", "--signal=KILL", "--user", "root")
            wait_until(lambda: not self.run("squeue", "-h").stdout.strip(), 30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for namespace in (*self._namespaces.values(), self._front):
            namespaces.remove(namespace)

    def run(self, *command: object, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command at the front, in the cluster's folder."""
        return subprocess.run(
            self._at("front", *map(str, command)),
            env=self._env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def logs(self) -> str:
        """Return the ends of all daemons' logs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def _at(self, host: str, *command: str) -> list[str]:
        namespace = self._namespaces.get(host, self._front)
        enter = ["ip", "netns", "exec", namespace, "unshare", "--uts", "--mount", "sh", "-c", ENTER, host]
        return [*enter, str(self.folder / "hosts"), *command]

    def _configure(self) -> None:
        folder = self.folder
        hosts = [f"{NETWORK}.{number} {name}" for number, name in enumerate(self._namespaces, start=1)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{NETWORK}.254 front", *hosts]) + "\n")
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (folder / "state").mkdir()
        # slurmd loads a plugin for control groups though nothing here uses them; this one needs none, and no systemd.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "slurm.conf").write_text(
            f"ClusterName=test\nSlurmctldHost=front\nAuthType=auth/munge\nAuthInfo=socket={folder}/munge.sock\n"
            f"SlurmUser=root\nSlurmdUser=root\nStateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\n"
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd-%n.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nReturnToService=2\n"
            "SelectType=select/cons_tres\nMailProg=/bin/true\nJobAcctGatherType=jobacct_gather/none\n"
            "AccountingStorageType=accounting_storage/none\nSlurmdParameters=config_overrides\n"
            f"NodeName={','.join(self._namespaces)} CPUs=4\n"
            "PartitionName=test Nodes=ALL Default=YES MaxTime=5 State=UP\n"
        )

    def _start(self) -> None:
        folder = self.folder
        files = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
        self._daemon("munged", ["munged", "--foreground", "--force", *options])
        if not wait_until((folder / "munge.sock").exists, 10):
            raise RuntimeError(f"munged does not listen\n{self.logs()}")
        self._daemon("slurmctld", self._at("front", "slurmctld", "-D"))
        for name in self._namespaces:
            self._daemon(name, self._at(name, "slurmd", "-D", "-N", name))
        count = str(len(self._namespaces))
        if not wait_until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == count, 30):
            raise RuntimeError(f"not all nodes are idle\n{self.run('sinfo', '-N').stdout}\n{self.logs()}")

    def _daemon(self, name: str, command: list[str]) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        self._daemons.append(subprocess.Popen(command, env=self._env, stdout=log, stderr=log, cwd=self.folder))


def run_page(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Do in ``folder`` what a page says, at the front of a cluster of four nodes."""
    with tempfile.TemporaryDirectory() as scratch, Slurm(Path(scratch), nodes=4) as slurm:
        done = slurm.run(sys.executable, Path(__file__).with_name("pages.py"), page, folder, seconds=900)
        if done.returncode:
            done.stderr += slurm.logs()
        return done


def main() -> int:
    """Run one page; return the exit status."""
    page, folder = (Path(word).resolve() for word in sys.argv[1:])
    reason = why_not()
    if reason is not None:
        print(f"{page}: skipped: {reason}")
        return 0
    done = run_page(page, folder)
    print(done.stdout + done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
