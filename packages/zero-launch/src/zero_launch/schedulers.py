"""Hand a job over to a scheduler: the command lines of srun and mpirun, and the sbatch file."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from zero_launch.hostfile import Hostfile
from zero_launch.spec import LaunchSpec


def srun_command(spec: LaunchSpec, nodes: int | None, options: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return an srun command line with one task per node, each of which is a zero-launch that finds its node and starts
    its ranks.

    ``spec``: only its target and arguments are used. ``nodes``: None for all of the allocation. ``options``:
    zero-launch's own for the inner command. ``arguments``: extra ones of srun.
    """
    count = [] if nodes is None else [f"--nodes={nodes}", f"--ntasks={nodes}"]
    inner = [sys.executable, "-m", "zero_launch", *options, *target_arguments(spec)]
    return ["srun", *count, "--ntasks-per-node=1", "--kill-on-bad-exit=1", *arguments, *inner]


def mpirun_command(
    spec: LaunchSpec,
    hosts: Hostfile | None,
    address: str | None,
    variables: Mapping[str, str],
    arguments: Sequence[str],
) -> list[str]:
    """Return the command line of Open MPI's mpirun with one process per rank, which zero-comm's `discover` recognises.

    ``hosts``: where the ranks run, one per slot; None for ``spec.nproc`` ranks on this machine. ``address``:
    MASTER_ADDR (None: the first host, if there are several). ``variables``: those to forward, by name; mpirun takes the
    values from its own environment. ``arguments``: extra ones of mpirun.
    """
    where = [] if hosts is None else ["--host", ",".join(f"{name}:{len(own)}" for name, own in hosts.hosts.items())]
    count = spec.nproc if hosts is None else hosts.world_size
    forward = [word for name in variables for word in ("-x", name)]
    if address is None and hosts is not None and len(hosts.hosts) > 1:
        address = next(iter(hosts.hosts))
    rank_0 = [] if address is None else ["-x", f"MASTER_ADDR={address}"]
    program = [] if spec.program else [sys.executable, *(["-m"] if spec.module else [])]
    command = ["mpirun", "-np", str(count), *where, *forward, *rank_0, *arguments]
    return [*command, *program, spec.target, *spec.args]


def target_arguments(spec: LaunchSpec) -> list[str]:
    """Return the end of zero-launch's command line for ``spec``: the option for the kind of target, the target and its
    arguments."""
    kind = ["--module"] if spec.module else ["--no_python"] if spec.program else []
    return [*kind, spec.target, *spec.args]


def sbatch_script(
    spec: LaunchSpec,
    *,
    name: str,
    nodes: int,
    time: str | None,
    partition: str | None,
    account: str | None,
    gpus: bool,
    options: Sequence[str],
    requeue: int | None = None,
) -> str:
    """Return the text of the batch file for a job of ``nodes`` nodes with ``spec.nproc`` ranks each, one launcher per
    node.

    The working directory and interpreter are those of this process; Slurm carries the environment over by itself.
    ``time``, ``partition`` and ``account`` are Slurm's, None for its defaults. ``gpus``: ask for one GPU per rank.
    ``options``: more options of zero-launch. ``requeue``: so many seconds before its time limit the job saves, ends and
    goes back into the queue.
    """
    directives = [
        f"--job-name={name}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={spec.nproc}"] if gpus else []),
        *([f"--time={time}"] if time else []),
        *([f"--partition={partition}"] if partition else []),
        *([f"--account={account}"] if account else []),
        f"--chdir={os.getcwd()}",
        "--output=%x-%j.out",
        *(["--requeue", "--open-mode=append", f"--signal=USR1@{requeue}"] if requeue else []),
    ]
    options = [*(["--requeue"] if requeue else []), *options]
    command = shlex.join([sys.executable, "-m", "zero_launch", "--nproc", str(spec.nproc), *options])
    target = shlex.join(target_arguments(spec))
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {directive}" for directive in directives),
        "",
        "# One launcher per node. Each finds its node by Slurm's variables and starts the ranks there; the one of the",
        "# first node leads. When a rank or a node fails, all end, and srun has the first failing rank's status.",
        "set -euo pipefail",
        f"srun --kill-on-bad-exit=1 {command} \\",
        f"  {target}",
    ]
    return "\n".join(lines) + "\n"
