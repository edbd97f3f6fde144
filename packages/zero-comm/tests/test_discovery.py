"""Which rank a process is, by the environments of the programs that start ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from comm_ranks import own_lines

from zero_comm import RankEnvironment, discover
from zero_comm.discovery import expand_counts, expand_hosts

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "71",
    "SLURM_NTASKS": "5",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[01-02,7]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "77",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"},
            ("torchrun", 5, 8, 1, 4, "a"),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0"}, ("torchrun", 1, 2, 0, 1, "pod-0")),
        (OPEN_MPI, ("Open MPI", 1, 2, 1, 2, "127.0.0.1")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "b"}, ("Open MPI", 1, 2, 1, 1, "b")),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            ("PMI", 1, 2, 1, 2, "127.0.0.1"),
        ),
        (SLURM, ("Slurm", 3, 5, 1, 2, "gpu01")),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "71"}, None),
        (
            {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.job"},
            ("Kubernetes", 2, 4, 0, 1, "job-0.job"),
        ),
    ],
)
def test_each_starters_variables_give_the_place(environ: dict[str, str], place: tuple[object, ...] | None) -> None:
    found = discover(environ)
    if place is None:
        assert found is None
    else:
        assert isinstance(found, RankEnvironment)
        numbers = (found.source, found.rank, found.world_size, found.local_rank, found.local_world_size, found.address)
        assert numbers == place
        assert 1024 < found.port < 32768


def test_ranks_that_mpich_starts_on_several_hosts_agree_on_a_port() -> None:
    common = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "a"}
    places = [
        discover({**common, "PMI_RANK": rank, "PMI_ID": rank, "PMI_PORT": f"host{rank}:{4000 + int(rank)}"})
        for rank in "01"
    ]
    assert len({place.port for place in places if place is not None}) == 1 and None not in places


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "set, but not MASTER_ADDR"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun -x MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "not OMPI_COMM_WORLD_SIZE"),
        ({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"}, "the name of the pod with index 0"),
    ],
)
def test_ranks_whose_place_is_half_known_are_told_what_is_missing(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        discover(environ)


def test_ranks_of_one_job_agree_on_the_port_and_another_step_has_another() -> None:
    ports = {discover({**SLURM, "SLURM_PROCID": str(rank)}).port for rank in range(5)}  # type: ignore[union-attr]
    other = discover({**SLURM, "SLURM_STEP_ID": "1"})
    assert len(ports) == 1 and other is not None and other.port not in ports


def test_slurms_notations() -> None:
    assert expand_hosts("gpu[01-03,7],login") == ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert expand_hosts("r[1-2]n[8-9]") == ["r1n8", "r1n9", "r2n8", "r2n9"]
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


SCRIPT = """
import torch, torch.distributed as dist, zero_comm
zero_comm.init("cpu")
groups = zero_comm.Mesh(device=torch.device("cpu")).open_groups()
out = torch.empty(2)
groups.gather.all_gather(out, torch.tensor([float(dist.get_rank())]), zero_comm.Tag("gather", "u")).wait()
dist.destroy_process_group()
print(out.tolist())
"""


@pytest.mark.parametrize("starter", ["Slurm", "Open MPI"])
def test_ranks_with_such_an_environment_find_each_other(starter: str) -> None:
    def environment(rank: int) -> dict[str, str]:
        keep = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        job = str(os.getpid())
        if starter == "Slurm":
            more = {"SLURM_PROCID": str(rank), "SLURM_STEP_ID": "0", "SLURM_JOB_ID": job, "SLURM_NTASKS": "2"}
            more |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": str(rank)}
        else:
            more = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(rank), "PMIX_NAMESPACE": job}
        return {**keep, "OMP_NUM_THREADS": "1", **more}

    command = [sys.executable, "-c", SCRIPT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env=environment(rank), **pipes) for rank in range(2)]  # type: ignore[call-overload]
    results = [rank.communicate(timeout=60) for rank in ranks]
    assert [own_lines(out) for out, _ in results] == [["[0.0, 1.0]"]] * 2, results
