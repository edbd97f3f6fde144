"""The command line of `zero-launch`: every option, and what each means for the job."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import NoReturn

from zero_launch.spec import SILENCE_SECONDS
from zero_launch.stand_ins import not_registered_error, registered_names

_EPILOG = """examples:
  zero-launch --nproc 2 train.py --lr 3e-4
  zero-launch --nproc 4 --log-dir runs -m project.train
  zero-launch --hostfile hosts --exclude node7 train.py
  zero-launch --no_ssh --nnodes 2 --node_rank 0 --master_addr node0 --master_port 29500 --nproc 8 train.py
  zero-launch --manifest jobset --image registry/train:1 --nnodes 4 --nproc 8 --volume data:/data train.py > job.yaml

also: zero-launch doctor, zero-launch slurm-script (each has --help)
"""


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports an unknown ``--as-NAME`` as a package that is not
    installed. Named as the parsers of other commands."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2; with advice if ``message`` is about an unknown ``--as-NAME``."""
        missing = re.search(r"unrecognized arguments:.* --as-([\w.-]+)", message)
        super().error(not_registered_error(missing[1]) if missing else message)


class _ShowVersion(argparse.Action):
    """Print the version of this package and end; reads its metadata only then."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show program's version number and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print the version, and exit with status 0."""
        from importlib.metadata import version

        print(f"zero-launch {version('zero-launch')}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: options, then the target, then the target's own arguments."""
    parser = _Parser(
        prog="zero-launch",
        description="Start one process per rank, here or on many hosts, and tell the truth about how they died.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion)
    add_target_options(parser)
    add_placement_options(parser)
    add_host_options(parser)
    add_output_options(parser)
    add_manifest_options(parser)
    parser.add_argument("target", metavar="TARGET", help="script (or module, or program) to run in every rank")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the target")
    return parser


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the target: its kind, restarts, elasticity and the end of its ranks."""
    group = parser.add_argument_group("what runs")
    group.add_argument("-m", "--module", action="store_true", help="TARGET is a module, as in python -m")
    group.set_defaults(stand_ins=[])
    for name in registered_names():
        group.add_argument(
            f"--as-{name}",
            action="append_const",
            dest="stand_ins",
            const=name,
            help=f"in the ranks, `import {name}` means the installed package that answers to that name",
        )
    group.add_argument("--no_python", "--no-python", action="store_true", help="TARGET is a program, run as it is")
    group.add_argument(
        "--no_local_rank",
        action="store_true",
        help="accepted: ranks get LOCAL_RANK in the environment, never as an argument",
    )
    group.add_argument(
        "--max_restarts",
        "--max-restarts",
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all ranks again, at most N times, when one fails",
    )
    group.add_argument(
        "--elastic",
        metavar="MIN:MAX",
        help="continue with MIN to MAX ranks when hosts or devices are lost, and grow at a checkpoint when they return",
    )
    group.add_argument(
        "--no_standby",
        "--no-standby",
        action="store_true",
        help="with --elastic, keep no process ready from which ranks start again (it has torch imported: some 0.3 GB)",
    )
    group.add_argument(
        "--requeue",
        action="store_true",
        help="on SIGUSR1 or SIGTERM have the ranks save and end; then `scontrol requeue` under Slurm, and status 75",
    )
    group.add_argument(
        "--grace", type=float, default=2.0, metavar="S", help="seconds to end by oneself before SIGKILL (default 2)"
    )
    group.add_argument(
        "--silence",
        type=float,
        default=SILENCE_SECONDS,
        metavar="S",
        help=f"a host not heard for so long is lost, a rank stopped for so long named (default {SILENCE_SECONDS:.0f})",
    )


def add_placement_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the number of ranks, their hosts and their cores."""
    group = parser.add_argument_group("how many ranks, and where")
    group.add_argument(
        *("--nproc", "--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num_accelerators"),
        dest="nproc",
        metavar="N",
        help="ranks per host; auto (default): one per accelerator, or the hostfile's slots",
    )
    group.add_argument("-H", "--hostfile", metavar="FILE", help="lines of 'host slots=N' (default: /job/hostfile)")
    group.add_argument("-i", "--include", default="", metavar="SPEC", help="only these: host[:slot,...][@host...]")
    group.add_argument("-e", "--exclude", default="", metavar="SPEC", help="all but these; the same grammar")
    group.add_argument("--num_nodes", type=int, metavar="N", help="the first N hosts of the hostfile")
    group.add_argument(
        "--nnodes",
        metavar="N or MIN:MAX",
        help="number of hosts; with MIN:MAX, MIN are enough to begin and after a restart",
    )
    group.add_argument("--bind_cores_to_rank", action="store_true", help="give each rank its own cores, by NUMA node")
    group.add_argument("--bind_core_list", default="", metavar="LIST", help="with these cores only, as in 0,2-5")


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about how other hosts are reached and at which address and port ranks meet."""
    group = parser.add_argument_group("how hosts are reached")
    group.add_argument(
        "--launcher",
        default="ssh",
        type=str.lower,
        choices=("ssh", "pdsh", "slurm", "mpi", "openmpi", "local"),
        help="default ssh; local starts every host's ranks on this machine",
    )
    group.add_argument("--launcher_args", default="", metavar="ARGS", help="extra arguments of the launcher's program")
    group.add_argument("--ssh_port", type=int, metavar="PORT", help="port of the hosts' sshd")
    group.add_argument("--force_multi", action="store_true", help="use the launcher for a single host too")
    group.add_argument(
        "--master_addr", "--master-addr", metavar="ADDR", help="where rank 0 is reached (default: as we reached it)"
    )
    group.add_argument(
        "--master_port", "--master-port", type=int, metavar="PORT", help="TCP port there (default: a free one)"
    )
    group.add_argument(
        "--bind_addr",
        "--bind-addr",
        metavar="ADDR",
        help="where to listen there, when --master_addr is not an address of that host (address translation)",
    )
    group.add_argument("--no_ssh", "--no-ssh", action="store_true", help="this command runs on every host by itself")
    group.add_argument("--node_rank", "--node-rank", type=int, metavar="R", help="with --no_ssh: number of this host")
    group.add_argument(
        "--forward", action="append", default=[], metavar="NAME", help="send this variable too, though it looks secret"
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the ranks' output, logs and records."""
    group = parser.add_argument_group("output")
    group.add_argument(
        *("--log-dir", "--log_dir", "--enable_each_rank_log"),
        dest="log_dir",
        metavar="DIR",
        help="keep each rank's output in a new folder under DIR",
    )
    group.add_argument(
        "--direct-rank", type=int, metavar="R", help="rank R writes straight to the terminal: for live displays"
    )
    group.add_argument(
        "--record", metavar="DIR", help="ranks record what they do in DIR; `zero-report DIR` makes a page of it"
    )
    group.add_argument("--save_pid", action="store_true", help="write the pid to <pid>.ds in the temporary folder")
    group.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        default=os.environ.get("ZERO_LOG") in ("warning", "error"),
        help="print only what the ranks print, and failures; so does ZERO_LOG=error in the environment",
    )


def add_manifest_options(parser: argparse.ArgumentParser) -> None:
    """Add `--manifest` and the options that describe the pods of a Kubernetes job."""
    group = parser.add_argument_group("Kubernetes: print a manifest of the job instead of running it")
    group.add_argument(
        "--manifest",
        choices=("jobset", "pytorchjob"),
        help="a JobSet, or a PyTorchJob of Kubeflow's training operator, with --nnodes pods of --nproc ranks each",
    )
    group.add_argument("--image", metavar="IMAGE", help="container image with the script and zero-launch")
    group.add_argument("--name", metavar="NAME", help="of the job (default: the target's)")
    group.add_argument("--namespace", metavar="NAME", help="default: that of kubectl")
    group.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:PATH",
        help="mount a persistent volume claim, for checkpoints or data, in every pod",
    )
    group.add_argument(
        "--nvme",
        action="append",
        default=[],
        metavar="SIZE:PATH",
        help="scratch space on the node's own disk, for nvme_path",
    )
    group.add_argument("--shm", default="16Gi", metavar="SIZE", help="size of /dev/shm (default 16Gi)")
    group.add_argument(
        "--gpus", default="nvidia.com/gpu", metavar="RESOURCE", help="one per rank (default nvidia.com/gpu); none"
    )
    group.add_argument("--cpus", metavar="N", help="processors that a pod asks for")
    group.add_argument("--memory", metavar="SIZE", help="memory that a pod asks for")
    group.add_argument(
        "--save-seconds",
        type=int,
        default=120,
        metavar="S",
        help="how long a pod that is to end may save (default 120)",
    )
    group.add_argument(
        "--token-secret", default="", metavar="NAME", help="Secret with the job's token (default: NAME-token)"
    )
