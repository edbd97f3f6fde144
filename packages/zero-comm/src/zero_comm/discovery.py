"""Find this process's rank in the environment of the program that started it.

`discover` asks one function per kind of launcher, `_torchrun` and the like. Each gets the environment variables
``env``, reads the rank, the sizes and rank 0's address from them, and returns None where its launcher's variables are
missing.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

_PORTS = (20000, 10000)  # first port and number of ports for jobs without MASTER_PORT; below the ephemeral range


@dataclass(frozen=True)
class RankEnvironment:
    """Rank and sizes that this process has by its environment, and where rank 0 can be reached.

    ``source``: the kind of launcher: `torchrun`, `Open MPI`, `PMI`, `Slurm`, `Kubernetes`. ``local_rank``,
    ``local_world_size``: rank and number of ranks on this host. ``address``, ``port``: TCP address of rank 0's store.
    """

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


def discover(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Return the rank that ``environ`` (default: os.environ) gives this process; None if no launcher set one.

    Looks, in this order, for RANK and WORLD_SIZE (torchrun, zero-launch, Kubernetes' training operator); Open MPI's
    mpirun; PMI (MPICH, Intel MPI); Slurm's srun with one task per rank; a Kubernetes indexed Job with WORLD_SIZE.
    MASTER_ADDR and MASTER_PORT are used wherever they are set. Raises ValueError when ranks are on several hosts and
    nothing says where rank 0 is, when RANK and WORLD_SIZE are set for several ranks without MASTER_ADDR, even on one
    host, and for a value that is no number. Under Slurm the node list says where rank 0 is.
    """
    env = os.environ if environ is None else environ
    for find in (_torchrun, _open_mpi, _pmi, _slurm, _indexed_job):
        place = find(env)
        if place is not None:
            return place
    return None


def local_rank() -> int:
    """Return this process's rank among the ranks of its host; 0 if no launcher set one.
    Raises ValueError as `discover` does."""
    place = discover()
    return 0 if place is None else place.local_rank


def _torchrun(env: Mapping[str, str]) -> RankEnvironment | None:
    """Return this process's rank environment by torchrun's variables; None without RANK and WORLD_SIZE. Without
    LOCAL_RANK and LOCAL_WORLD_SIZE the process is taken to be alone on its host; without MASTER_PORT the port is 29500.
    Raises ValueError as `discover` does."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    # One process per pod or host says no local rank, and is then alone there.
    local, locals_ = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
    if world_size > 1 and "MASTER_ADDR" not in env:
        raise ValueError(f"RANK={rank} and WORLD_SIZE={world_size} are set, but not MASTER_ADDR: name rank 0's host")
    address, port = env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", "29500"))
    return RankEnvironment("torchrun", rank, world_size, local, locals_, address, port)


def _open_mpi(env: Mapping[str, str]) -> RankEnvironment | None:
    """Return this process's rank environment by Open MPI's variables; None without them. Raises ValueError as
    `discover` does."""
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("OMPI_MCA_orte_ess_jobid", "")
    if "OMPI_COMM_WORLD_SIZE" not in env:
        raise ValueError("OMPI_COMM_WORLD_RANK is set, but not OMPI_COMM_WORLD_SIZE: start the ranks with mpirun")
    rank, world_size = int(env["OMPI_COMM_WORLD_RANK"]), int(env["OMPI_COMM_WORLD_SIZE"])
    local, locals_ = int(env.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")), int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    sizes = (rank, world_size, local, locals_)
    return _rank_environment(env, "Open MPI", sizes, job, "mpirun -x MASTER_ADDR=<host of rank 0>")


def _pmi(env: Mapping[str, str]) -> RankEnvironment | None:
    """Return this process's rank environment by PMI's variables (MPICH, Intel MPI); None without them, and under Slurm.
    Without MPI_LOCALRANKID and MPI_LOCALNRANKS the process is taken to be alone on its host. Raises ValueError as
    `discover` does."""
    if "PMI_RANK" not in env or "PMI_SIZE" not in env or "SLURM_PROCID" in env:
        return None
    rank, world_size = int(env["PMI_RANK"]), int(env["PMI_SIZE"])
    local, locals_ = int(env.get("MPI_LOCALRANKID", "0")), int(env.get("MPI_LOCALNRANKS", "1"))
    sizes = (rank, world_size, local, locals_)
    # MPICH's PMI_ID is the rank, its PMI_PORT that of each host's own proxy: nothing here is the job's.
    return _rank_environment(env, "PMI", sizes, "", "mpiexec -genv MASTER_ADDR <host of rank 0>")


def _slurm(env: Mapping[str, str]) -> RankEnvironment | None:
    """Return this process's rank environment by the variables of Slurm's srun; None outside of srun. Rank 0's address
    is MASTER_ADDR, else the first host of the step, or 127.0.0.1 on a single host; the port is MASTER_PORT, else one
    that follows from the step's id. Raises ValueError for a value that is no number."""
    # SLURM_STEP_ID is only there inside srun: a batch script's own shell is no rank.
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None
    rank, world_size = int(env["SLURM_PROCID"]), int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1"))
    tasks = expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1"))
    node = int(env.get("SLURM_NODEID", "0"))
    locals_ = tasks[node] if node < len(tasks) else 1
    hosts = expand_hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1")
    address = env.get("MASTER_ADDR") or (hosts[0] if len(hosts) > 1 else "127.0.0.1")
    step = f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    port = int(env["MASTER_PORT"]) if "MASTER_PORT" in env else _port_of_job(step)
    return RankEnvironment("Slurm", rank, world_size, int(env.get("SLURM_LOCALID", "0")), locals_, address, port)


def _indexed_job(env: Mapping[str, str]) -> RankEnvironment | None:
    """Return this process's rank environment by the index that Kubernetes gives each pod of an indexed Job, one rank
    per pod; None without JOB_COMPLETION_INDEX or WORLD_SIZE. Raises ValueError as `discover` does."""
    if "JOB_COMPLETION_INDEX" not in env or "WORLD_SIZE" not in env:
        return None
    sizes = (int(env["JOB_COMPLETION_INDEX"]), int(env["WORLD_SIZE"]), 0, 1)
    hint = "MASTER_ADDR, the name of the pod with index 0, in the Job's template"
    return _rank_environment(env, "Kubernetes", sizes, "", hint)


def _rank_environment(
    env: Mapping[str, str], source: str, sizes: tuple[int, int, int, int], job: str, hint: str
) -> RankEnvironment:
    """Return the rank environment with ``sizes`` = (rank, world size, local rank, local world size), and with the
    address and port of MASTER_ADDR and MASTER_PORT in ``env``; without them 127.0.0.1 and a port that follows from
    ``job``.

    ``source``: the kind of launcher. ``job``: an id that all ranks of the job share. Raises ValueError where ranks are
    on several hosts without MASTER_ADDR; ``hint`` ends its text with how the user sets that.
    """
    rank, world_size, local, locals_ = sizes
    address = env.get("MASTER_ADDR")
    if address is None:
        if locals_ != world_size:
            raise ValueError(
                f"{source} started {world_size} ranks on several hosts, and nothing says where rank 0 is: set {hint}"
            )
        address = "127.0.0.1"
    port = int(env["MASTER_PORT"]) if "MASTER_PORT" in env else _port_of_job(job)
    return RankEnvironment(source, rank, world_size, local, locals_, address, port)


def _port_of_job(job: str) -> int:
    """Return a port from 20000 to 29999 that follows from the id ``job``: the same on every rank, most likely another
    for another job; 20000 for an empty id."""
    first, count = _PORTS
    return first + zlib.crc32(job.encode()) % count


def expand_hosts(text: str) -> list[str]:
    """Return the host names of a Slurm node list ``text``: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login."""
    hosts = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            endings = [literal] if literal else [number for span in ranges.split(",") for number in _expand_range(span)]
            names = [name + ending for name in names for ending in endings]
        hosts += names
    return hosts


def _expand_range(span: str) -> list[str]:
    """Return the numbers of ``span`` as text, padded alike: `01-03` is 01, 02, 03; a single number is itself."""
    first, dash, last = span.partition("-")
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if dash else [first]


def expand_counts(text: str) -> list[int]:
    """Return the number of tasks on each node from Slurm's notation ``text``: `2(x3),1` is 2, 2, 2, 1."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or "1")
    return counts
