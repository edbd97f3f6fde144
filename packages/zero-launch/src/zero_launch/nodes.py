"""Find the node of a job that this process is, when something else starts one launcher per node."""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

_PORTS = (20000, 10000)  # first port and number of ports, below the ephemeral range


@dataclass(frozen=True)
class Node:
    """This node among ``nodes``, with number ``rank``, and the ``address`` and ``port`` where node 0 listens.

    ``source`` says who told: `Slurm`, `Kubernetes`, or `--no_ssh` for the command line.
    """

    source: str
    rank: int
    nodes: int
    address: str
    port: int


def discover_node(environ: Mapping[str, str]) -> Node | None:
    """Return the node that this process is, by the environment of `srun` with one task per node, or of torchrun's
    variables in a pod (PET_*).

    MASTER_ADDR and MASTER_PORT override where node 0 of a Slurm job listens. None when there is only one node, a range
    of nodes, or nothing is said. Raises RuntimeError when Slurm's node list cannot be read, FileNotFoundError when
    `scontrol` is needed for it and not installed, and ValueError for a number that is none.
    """
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    if "SLURM_STEP_ID" in environ and nodes > 1 and environ.get("SLURM_STEP_NUM_TASKS", "") == str(nodes):
        job = f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
        address = environ.get("MASTER_ADDR") or slurm_hosts(environ["SLURM_STEP_NODELIST"])[0]
        port = int(environ.get("MASTER_PORT", _PORTS[0] + zlib.crc32(job.encode()) % _PORTS[1]))
        return Node("Slurm", int(environ["SLURM_NODEID"]), nodes, address, port)
    told = environ.get("PET_NNODES", "1")
    if told.isdigit() and int(told) > 1 and "PET_NODE_RANK" in environ and "PET_MASTER_ADDR" in environ:
        port = int(environ.get("PET_MASTER_PORT", "29500"))
        return Node("Kubernetes", int(environ["PET_NODE_RANK"]), int(told), environ["PET_MASTER_ADDR"], port)
    return None


def slurm_hosts(node_list: str) -> list[str]:
    """Return the host names of a Slurm node list such as `node[1-3]`, by `scontrol`. Raises RuntimeError with its
    message if it fails, FileNotFoundError if it is not installed."""
    command = ["scontrol", "show", "hostnames", node_list]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.split()
