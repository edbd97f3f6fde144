"""The option `--manifest`: print what Kubernetes needs to run the job that the command line describes."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import PurePath

from zero_launch.kubernetes import Pods, manifest

_ELSEWHERE: dict[str, object] = {
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
"""Options that have no meaning in pods, with what they are when they are not given."""
_PASSED = {
    "log_dir": "--log-dir",
    "record": "--record",
    "grace": "--grace",
    "silence": "--silence",
    "bind_core_list": "--bind_core_list",
    "elastic": "--elastic",
}
_FLAGS = {"quiet": "--quiet", "bind_cores_to_rank": "--bind_cores_to_rank"}
_PORT = 29500


def print_manifest(options: argparse.Namespace) -> None:
    """Write the manifest to standard output, and what else is to be done to standard error.

    Raises ValueError for options that mean nothing in pods, and for values that are missing.
    """
    import yaml

    pods = pods_of(options)
    sys.stdout.write(yaml.safe_dump(manifest(options.manifest, pods), sort_keys=False))
    if pods.nodes > 1:
        where = f" -n {pods.namespace}" if pods.namespace else ""
        print(
            f"zero-launch: the pods know each other by the Secret {pods.secret}; make it once:\n"
            f'  kubectl create secret generic {pods.secret}{where} --from-literal=token="$(openssl rand -hex 32)"',
            file=sys.stderr,
        )


def pods_of(options: argparse.Namespace) -> Pods:
    """Return what the options say of the job's pods. Raises ValueError for what cannot be."""
    for name, absent in _ELSEWHERE.items():
        if getattr(options, name) != absent:
            raise ValueError(
                f"--{name}: means nothing with --manifest, where every pod is a node of the job and Kubernetes starts "
                "them; leave it out"
            )
    if not options.image:
        raise ValueError("--manifest needs --image: the container image that has the script and zero-launch")
    nproc = _number("--nproc", options.nproc, 'the ranks of a pod; "auto" would count devices of this machine')
    return Pods(
        name=options.name or _name_of(options.target),
        image=options.image,
        arguments=_target(options),
        nodes=_number("--nnodes", options.nnodes or "1", "the number of pods; for a range of ranks say --elastic"),
        nproc=nproc,
        namespace=options.namespace,
        claims=[_pair("--volume", "CLAIM:PATH", word) for word in options.volume],
        disks=[_pair("--nvme", "SIZE:PATH", word) for word in options.nvme],
        shared_memory=options.shm,
        gpus="" if options.gpus == "none" else options.gpus,
        cpus=options.cpus,
        memory=options.memory,
        save_seconds=options.save_seconds,
        restarts=options.max_restarts,
        elastic=_range(options.elastic),
        port=options.master_port or _PORT,
        token_secret=options.token_secret,
        options=_passed(options),
    )


def _passed(options: argparse.Namespace) -> list[str]:
    """The options of zero-launch that hold in pods as they are."""
    from zero_launch.options import parser

    words = [word for name, flag in _FLAGS.items() if getattr(options, name) for word in [flag]]
    for name, option in _PASSED.items():
        value = getattr(options, name)
        if value not in (None, parser().get_default(name)):
            words += [option, str(value)]
    if options.elastic is not None and options.max_restarts:
        words += ["--max_restarts", str(options.max_restarts)]  # else Kubernetes starts the whole job again
    return words + [f"--as-{name}" for name in options.stand_ins]


def _target(options: argparse.Namespace) -> list[str]:
    kind = ["--module"] if options.module else ["--no_python"] if options.no_python else []
    return [*kind, options.target, *options.args]


def _number(option: str, word: str | None, meaning: str) -> int:
    if word is None or not str(word).isdigit() or int(word) < 1:
        raise ValueError(f"{option}: --manifest needs a number ({meaning}), got {word!r}")
    return int(word)


def _range(word: str | None) -> tuple[int, int] | None:
    if word is None:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", word)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--elastic: expected MIN:MAX ranks with 1 <= MIN <= MAX, got {word!r}")
    return int(found[1]), int(found[2])


def _pair(option: str, form: str, word: str) -> tuple[str, str]:
    first, colon, second = word.partition(":")
    if not (first and colon and second):
        raise ValueError(f"{option}: expected {form}, got {word!r}")
    return first, second


def _name_of(target: str) -> str:
    """A name made of the target's: `my_job/Train.py` is `train`."""
    stem = PurePath(target).name.removesuffix(".py").rsplit(".", 1)[-1]
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
