"""The command `zero-launch`, also `python -m zero_launch`. ``options`` are always the parsed command line
(options.py)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from zero_launch.cluster_launch import launch_cluster
from zero_launch.devices import devices, ranks_within
from zero_launch.environment import Forwarded, env_files, forwarded, read_env_file
from zero_launch.handshake import shared_token
from zero_launch.hostfile import Hostfile
from zero_launch.job import launch
from zero_launch.nodes import Node, discover_node
from zero_launch.options import parser
from zero_launch.record import record_failure, record_variables
from zero_launch.report import LaunchError
from zero_launch.requeue import LeftEarly, hold, requeue
from zero_launch.schedulers import mpirun_command, srun_command
from zero_launch.spec import ClusterSpec, LaunchSpec
from zero_launch.stand_ins import search_paths
from zero_launch.torch_import import keep_from_collector
from zero_launch.transport import Transport

_DEFAULT_HOSTFILE = Path("/job/hostfile")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; errors are printed, not raised.

    The status is 0 for success; that of the first rank that failed; 1 when hosts or nodes cannot be reached, or the
    launcher's own work fails; 2 for a wrong command line or a missing file; 75 for a job that saved and left
    (`--requeue`); 128 plus the number of a signal that ended the job.
    ``argv``: the words after the command's name; None takes those of `sys.argv`, and has torch imported without the
    garbage collector. Words that argparse refuses, and `--help`, raise SystemExit.
    """
    if argv is None:  # this process is the command's
        keep_from_collector()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        os.getcwd()
    except FileNotFoundError:
        _say("the working directory no longer exists: change to one that does")
        return 2
    try:
        if words[:1] == ["doctor"]:
            from zero_launch import doctor

            return doctor.main(words[1:])
        if words[:1] == ["slurm-script"]:
            from zero_launch import slurm

            return slurm.main(words[1:])
        options = parser().parse_args(words)
        if options.manifest:
            from zero_launch.manifest import print_manifest

            print_manifest(options)
            return 0
        with _pid_file() if options.save_pid else contextlib.nullcontext(), _recording_failures(options.record):
            _run_job(options)
    except LaunchError as error:
        print(f"zero-launch: {error}", file=sys.stderr, flush=True)
        if not error.asked:
            return error.exit_code
        status, text = requeue(os.environ, saved=False)
        _say(text)
        return status
    except LeftEarly as left:
        status, text = requeue(os.environ if left.leads else {})
        _say(text)
        return status
    except BrokenPipeError:
        # Whoever read our output is gone, and the job was ended for it. What is buffered has no reader either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ConnectionError, RuntimeError) as error:
        print(f"zero-launch: {error}", file=sys.stderr, flush=True)
        return 1
    except (OSError, ValueError) as error:
        meant = _nearest_command(words) if isinstance(error, FileNotFoundError) else ""
        print(f"zero-launch: {error}{meant}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _nearest_command(words: Sequence[str]) -> str:
    """Return the end of an error about a missing script: a question whether the first of the command line's ``words``
    was to be `doctor` or `slurm-script`, if it is similar to one of these; else empty."""
    near = difflib.get_close_matches(words[0], ("doctor", "slurm-script"), n=1) if words else []
    return f"; did you mean 'zero-launch {near[0]}'?" if near else ""


@contextlib.contextmanager
def _recording_failures(folder: str | None) -> Iterator[None]:
    """Context manager: if the block raises LaunchError, write the failure into the record ``folder`` (None: nowhere),
    print where the report is, and raise the error again."""
    try:
        yield
    except LaunchError as error:
        if folder is not None and (report := record_failure(folder, error)) is not None:
            _say(f"report: {report}")
        raise


def _run_job(options: argparse.Namespace) -> None:
    """Run the job that the options describe to its end: on this machine, as one node of several, on the chosen hosts,
    or by srun or mpirun, which replaces this process. Raises LaunchError if the job fails, LeftEarly if its ranks saved
    and left, and ValueError or FileNotFoundError if it cannot begin as described."""
    node = _this_node(options)
    if options.launcher == "slurm":
        job = _job_spec(options, _requested_ranks(options))
        _replace_process(srun_command(job, _node_count(options)[1], [], _launcher_arguments(options)))
    elif node is not None:
        _run_node(options, node)
    else:
        hosts = chosen_hosts(options)
        if options.launcher in ("mpi", "openmpi"):
            job = _job_spec(options, 1 if hosts else _requested_ranks(options))
            variables = _variables(options).variables
            _replace_process(mpirun_command(job, hosts, options.master_addr, variables, _launcher_arguments(options)))
        elif hosts is None:
            launch(_held_job(options, _ranks_here))
        elif len(hosts.hosts) == 1 and _is_here(next(iter(hosts.hosts))) and not options.force_multi:
            slots = next(iter(hosts.hosts.values()))
            env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))} if options.include or options.exclude else {}
            job = _held_job(options, lambda options: len(slots))
            launch(dataclasses.replace(job, env={**job.env, **env}))
        else:
            _run_hosts(options, hosts)


def _run_hosts(options: argparse.Namespace, hosts: Hostfile) -> None:
    """Run the job on ``hosts``, or on as many of them as `--nnodes` allows, started through the chosen launcher. Raises
    ValueError for options that cannot be, LaunchError if the job fails, and LeftEarly if its ranks saved and left.
    """
    minimum, maximum = _node_count(options)
    if maximum is not None and maximum < len(hosts.hosts):
        hosts = hosts.first(hosts=maximum)
    chosen = _variables(options)
    job = _held_job(options, lambda options: 1)
    job.check_target()
    if not options.quiet:
        _say(_greeting(hosts, chosen))
    launch_cluster(
        ClusterSpec(
            job,
            hosts,
            Transport(options.launcher, _launcher_arguments(options), options.ssh_port),
            min_hosts=minimum,
            variables=chosen.variables,
            master_address=options.master_addr,
            master_port=options.master_port or 0,
            bind_devices=bool(options.include or options.exclude),
            bind_address=options.bind_addr,
        )
    )


def _run_node(options: argparse.Namespace, node: Node) -> None:
    """Run this node's part of a job in which every node has a command line of its own: lead the job as node 0, else
    join it. Raises ValueError for a node number out of range, ConnectionError if node 0 does not answer or refuses this
    node, LaunchError if the job fails, and LeftEarly if its ranks saved and left."""
    job = _held_job(options, _requested_ranks) if node.rank == 0 else _job_spec(options, _requested_ranks(options))
    job.check_target()
    if not 0 <= node.rank < node.nodes:
        raise ValueError(f"--node_rank must be from 0 to {node.nodes - 1}, got {node.rank}")
    if not options.quiet:
        _say(f"node {node.rank} of {node.nodes}, led by {node.address}:{node.port}")
    token = shared_token(os.environ, Path.home())
    if node.rank > 0:
        from zero_launch.remote_node import join

        join(node, job, token)
        return
    here = Hostfile({socket.gethostname(): tuple(range(job.nproc))})
    launch_cluster(
        ClusterSpec(
            job,
            here,
            Transport("local"),
            min_hosts=_node_count(options)[0] if options.no_ssh else None,
            master_address=node.address,
            master_port=node.port,
            nodes=node.nodes,
            token=token,
            bind_address=options.bind_addr,
        )
    )


def _this_node(options: argparse.Namespace) -> Node | None:
    """Return this machine's number among the job's nodes, and how to reach node 0, if every node of the job has a
    command line of its own: with `--no_ssh`, or by the variables of Slurm or of a Kubernetes pod. Return None for other
    jobs. Raises ValueError if `--no_ssh` lacks options that it needs."""
    if not options.no_ssh:
        if options.hostfile or options.launcher != "ssh":
            return None
        return discover_node(os.environ)
    _, nodes = _node_count(options)
    nodes = nodes or options.num_nodes
    needed = {"--nnodes": nodes, "--node_rank": options.node_rank, "--master_addr": options.master_addr}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ValueError(f"--no_ssh needs {', '.join(missing)}, the same on every node except --node_rank")
    return Node("--no_ssh", options.node_rank, int(nodes), options.master_addr, options.master_port or 29500)


def chosen_hosts(options: argparse.Namespace) -> Hostfile | None:
    """Return the hosts that the options select; None for this machine alone. Raises ValueError and FileNotFoundError as
    `Hostfile` does.

    They are those of `--hostfile`, else of /job/hostfile, else this machine if `--include` or `--exclude` is given.
    `--num_nodes` and `--nproc` take the first hosts and the first slots of each.
    """
    if options.hostfile is not None:
        hosts = Hostfile.read(options.hostfile)
    elif _DEFAULT_HOSTFILE.is_file():
        hosts = Hostfile.read(_DEFAULT_HOSTFILE)
        _say(f"hosts of {_DEFAULT_HOSTFILE}")
    elif options.include or options.exclude:
        hosts = Hostfile({"localhost": tuple(range(ranks_for("auto")))})
    else:
        return None
    hosts = hosts.select(include=options.include, exclude=options.exclude)
    slots = None if options.nproc in (None, "auto") else ranks_for(options.nproc)
    return hosts.first(hosts=options.num_nodes, slots=slots)


def _node_count(options: argparse.Namespace) -> tuple[int | None, int | None]:
    """Return the fewest and the most hosts that `--nnodes` allows; None for both without it. Raises
    ValueError for anything but N or MIN:MAX."""
    if options.nnodes is None:
        return None, None
    first, colon, last = options.nnodes.partition(":")
    if not first.isdigit() or (colon and not last.isdigit()) or int(first) < 1 or int(last or first) < int(first):
        raise ValueError(f"--nnodes: expected N or MIN:MAX with 1 <= MIN <= MAX, got {options.nnodes!r}")
    return int(first), int(last or first)


def _job_spec(options: argparse.Namespace, nproc: int) -> LaunchSpec:
    """Return the job that the options describe, with ``nproc`` ranks on this machine. Raises
    ValueError as `LaunchSpec` and `search_paths` do."""
    return LaunchSpec(
        options.target,
        args=tuple(options.args),
        nproc=nproc,
        module=options.module,
        env={**search_paths(options.stand_ins, os.environ), **record_variables(options.record)},
        program=options.no_python,
        log_dir=options.log_dir,
        grace_seconds=options.grace,
        silence_seconds=options.silence,
        direct_rank=options.direct_rank,
        quiet=options.quiet,
        max_restarts=options.max_restarts,
        bind_cores=options.bind_cores_to_rank or bool(options.bind_core_list),
        core_list=options.bind_core_list,
        elastic=_elastic_bounds(options),
        requeue=options.requeue,
        standby=not options.no_standby,
    )


def _held_job(options: argparse.Namespace, ranks: Callable[[argparse.Namespace], int]) -> LaunchSpec:
    """Return the job that the options describe, with as many ranks as ``ranks`` returns when it is called with
    ``options``. With `--requeue`, hold back the signals that ask the job to end before that call, which may take a
    while, until the job can handle them.
    """
    if options.requeue:
        hold()
    return _job_spec(options, ranks(options))


def _ranks_here(options: argparse.Namespace) -> int:
    """Return the number of ranks on this machine: that of `--nproc`, or as many as `--elastic` allows for its
    accelerators.

    Raises ValueError for a number out of the bounds of `--elastic`.
    """
    elastic = _elastic_bounds(options)
    if elastic is None or options.nproc not in (None, "auto"):
        count = _requested_ranks(options)
        if elastic is not None and not elastic[0] <= count <= elastic[1]:
            raise ValueError(f"--nproc {count}: expected from {elastic[0]} to {elastic[1]} ranks, as --elastic says")
        return count
    return ranks_within(elastic, devices())


def _elastic_bounds(options: argparse.Namespace) -> tuple[int, int] | None:
    """Return the least and the most ranks that `--elastic` allows; None without it.
    Raises ValueError for anything but MIN:MAX."""
    if options.elastic is None:
        return None
    least, colon, most = options.elastic.partition(":")
    if not colon or not least.isdigit() or not most.isdigit() or not 1 <= int(least) <= int(most):
        raise ValueError(f"--elastic: expected MIN:MAX ranks with 1 <= MIN <= MAX, got {options.elastic!r}")
    return int(least), int(most)


def _requested_ranks(options: argparse.Namespace) -> int:
    """Return the number of ranks that `--nproc` means; without the option one per accelerator, at least 1. Raises
    ValueError for anything but a number or `auto`."""
    return ranks_for(options.nproc or "auto")


def ranks_for(nproc: str) -> int:
    """Return the number of ranks that `--nproc` means: the number itself; for `auto` one per accelerator, at least 1.

    Raises ValueError for any other word. `auto` imports torch.
    """
    if nproc != "auto":
        try:
            return int(nproc)
        except ValueError:
            raise ValueError(f"--nproc: expected a number or auto, got {nproc!r}") from None
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 1


def _variables(options: argparse.Namespace) -> Forwarded:
    """Return the environment variables to send to other hosts, those of `.deepspeed_env` files and `--forward`
    included. Raises ValueError as `forwarded` and `search_paths` do."""
    files = [read_env_file(path) for path in env_files(os.environ, Path.cwd(), Path.home())]
    return forwarded({**os.environ, **search_paths(options.stand_ins, os.environ)}, files, options.forward)


def _launcher_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the words of `--launcher_args`."""
    return tuple(shlex.split(options.launcher_args))


def _greeting(hosts: Hostfile, chosen: Forwarded) -> str:
    """Return the line that says what starts on several hosts: the ranks of each, and which variables stay behind."""
    ranks = ", ".join(f"{name} {len(slots)}" for name, slots in hosts.hosts.items())
    text = f"{hosts.world_size} ranks on {len(hosts.hosts)} hosts ({ranks}); {len(chosen.variables)} variables go along"
    if chosen.withheld:
        text += f", but not {', '.join(chosen.withheld)}: they look secret (--forward NAME sends one)"
    return text


def _is_here(host: str) -> bool:
    """Return whether ``host`` is a name of this machine that needs no look-up: localhost, a loopback address or its
    host name."""
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def _replace_process(command: list[str]) -> None:
    """Print ``command`` (its words) and replace this process by it. Raises FileNotFoundError when its program is not in
    PATH."""
    _say(shlex.join(command))
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        raise FileNotFoundError(f"no {command[0]} in PATH; install it, or choose another --launcher") from None


@contextlib.contextmanager
def _pid_file() -> Iterator[None]:
    """Context manager: keep this process's pid in the file `<temporary folder>/PID.ds` (`--save_pid`).

    Raises FileExistsError if something lies at that path.
    """
    path = Path(tempfile.gettempdir()) / f"{os.getpid()}.ds"
    # Others may write into that folder and know the name: what lies there is neither followed nor written over, and
    # nobody reads a file that is still empty.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="ascii") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(str(os.getpid()))
        file.flush()
        try:
            os.link(file.name, path)
        except FileExistsError:
            raise FileExistsError(
                f"--save_pid: {path} is there already; remove it, or set TMPDIR to a folder of yours"
            ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _say(text: str) -> None:
    """Print a line of the launcher's on standard error."""
    print(f"zero-launch: {text}", file=sys.stderr, flush=True)
