"""The option `--manifest`: print the Kubernetes manifest of the job that the command line describes."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import PurePath

from zero_launch.kubernetes import Pods, manifest

_NOT_IN_PODS: dict[str, object] = {
    "hostfile": None,
    "include": "",
    "exclude": "",
    "num_nodes": None,
    "launcher": "ssh",
    "launcher_args": "",
    "ssh_port": None,
    "force_multi": False,
    "master_addr": None,
    "bind_addr": None,
    "no_ssh": False,
    "node_rank": None,
    "forward": [],
    "direct_rank": None,
    "save_pid": False,
}
"""Options without meaning in pods, with their defaults."""
_OPTIONS_IN_PODS = {
    "log_dir": "--log-dir",
    "record": "--record",
    "grace": "--grace",
    "silence": "--silence",
    "bind_core_list": "--bind_core_list",
    "elastic": "--elastic",
}
"""Options with a value that the launcher in each pod gets too: attribute -> option."""
_FLAGS_IN_PODS = {"quiet": "--quiet", "bind_cores_to_rank": "--bind_cores_to_rank"}
_PORT = 29500


def print_manifest(options: argparse.Namespace) -> None:
    """Write the manifest to standard output; for several pods, print the command that makes their Secret on stderr.

    Raises ValueError for options without meaning in pods, and for missing or malformed values.
    """
    import yaml

    pods = pods_from_options(options)
    sys.stdout.write(yaml.safe_dump(manifest(options.manifest, pods), sort_keys=False))
    if pods.nodes > 1:
        where = f" -n {pods.namespace}" if pods.namespace else ""
        print(
            f"zero-launch: the pods know each other by the Secret {pods.secret}; make it once:\n"
            f'  kubectl create secret generic {pods.secret}{where} --from-literal=token="$(openssl rand -hex 32)"',
            file=sys.stderr,
        )


def pods_from_options(options: argparse.Namespace) -> Pods:
    """Return the pods that the options of `zero-launch --manifest` describe (see options.py).

    Raises ValueError for options without meaning in pods, and for missing or malformed values.
    """
    for name, absent in _NOT_IN_PODS.items():
        if getattr(options, name) != absent:
            raise ValueError(
                f"--{name}: means nothing with --manifest, where every pod is a node of the job and Kubernetes starts "
                "them; leave it out"
            )
    if not options.image:
        raise ValueError("--manifest needs --image: the container image that has the script and zero-launch")
    nproc = _parse_count("--nproc", options.nproc, 'the ranks of a pod; "auto" would count devices of this machine')
    return Pods(
        name=options.name or _job_name(options.target),
        image=options.image,
        arguments=_target_arguments(options),
        nodes=_parse_count("--nnodes", options.nnodes or "1", "the number of pods; for a range of ranks say --elastic"),
        nproc=nproc,
        namespace=options.namespace,
        claims=[_parse_pair("--volume", "CLAIM:PATH", word) for word in options.volume],
        disks=[_parse_pair("--nvme", "SIZE:PATH", word) for word in options.nvme],
        shared_memory=options.shm,
        gpus="" if options.gpus == "none" else options.gpus,
        cpus=options.cpus,
        memory=options.memory,
        save_seconds=options.save_seconds,
        restarts=options.max_restarts,
        elastic=_parse_range(options.elastic),
        port=options.master_port or _PORT,
        token_secret=options.token_secret,
        options=_options_in_pods(options),
    )


def _options_in_pods(options: argparse.Namespace) -> list[str]:
    """Return the options of this command that the launcher in each pod gets too, as words of its command line."""
    from zero_launch.options import parser

    words = [word for name, flag in _FLAGS_IN_PODS.items() if getattr(options, name) for word in [flag]]
    for name, option in _OPTIONS_IN_PODS.items():
        value = getattr(options, name)
        if value not in (None, parser().get_default(name)):
            words += [option, str(value)]
    if options.elastic is not None and options.max_restarts:
        words += ["--max_restarts", str(options.max_restarts)]  # else Kubernetes starts the whole job again
    return words + [f"--as-{name}" for name in options.stand_ins]


def _target_arguments(options: argparse.Namespace) -> list[str]:
    """Return the end of the command line: the target, the option that says what kind it is, and its own arguments."""
    kind = ["--module"] if options.module else ["--no_python"] if options.no_python else []
    return [*kind, options.target, *options.args]


def _parse_count(option: str, word: str | None, meaning: str) -> int:
    """Return ``word``, the user's value of ``option``, as a number. ``meaning``: what the number is, for the error
    message. Raises ValueError for None, and for anything but a number of at least 1.
    """
    if word is None or not str(word).isdigit() or int(word) < 1:
        raise ValueError(f"{option}: --manifest needs a number ({meaning}), got {word!r}")
    return int(word)


def _parse_range(word: str | None) -> tuple[int, int] | None:
    """Return the least and the most ranks that ``word``, the value of `--elastic`, names as MIN:MAX; None for None.
    Raises ValueError for anything else."""
    if word is None:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", word)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--elastic: expected MIN:MAX ranks with 1 <= MIN <= MAX, got {word!r}")
    return int(found[1]), int(found[2])


def _parse_pair(option: str, form: str, word: str) -> tuple[str, str]:
    """Return the two parts of ``word``, a value of ``option``, before and behind its first colon. ``form``: what the
    parts are, such as SIZE:PATH, for the error message. Raises ValueError if one is missing or empty."""
    first, colon, second = word.partition(":")
    if not (first and colon and second):
        raise ValueError(f"{option}: expected {form}, got {word!r}")
    return first, second


def _job_name(target: str) -> str:
    """Return a name for the job, made of its target's in the letters that Kubernetes allows: `train` for
    `my_job/Train.py`, `run-1` for the module `jobs.run_1`."""
    stem = PurePath(target).name.removesuffix(".py").rsplit(".", 1)[-1]
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
