"""Two nodes on one machine: network namespaces with one wire between them, whose bytes the kernel counts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import namespaces

WIRE = "net0"


def why_not() -> str | None:
    """Why there can be no such nodes here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"no {program} here (Debian: iproute2)"
    return namespaces.refused()


class TwoNodes:
    """Two namespaces, as a context. ``rate``: what the wire carries in each direction, as tc writes it (`1gbit`)."""

    def __init__(self, rate: str | None = None) -> None:
        self._rate = rate
        self._names = [f"zn{os.getpid()}{end}" for end in "ab"]

    def __enter__(self) -> TwoNodes:
        namespaces.remove_stale("zn")
        try:
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def run(self, script: Path, *arguments: str, ranks_per_node: int = 2, timeout: float = 220) -> Any:
        """Run ``script`` on every rank, and return what the first prints as JSON on its last line."""
        shared = {
            "WORLD_SIZE": str(2 * ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "MASTER_ADDR": "10.78.0.1",
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": WIRE,
            "OMP_NUM_THREADS": "1",
        }
        ranks = []
        for rank in range(2 * ranks_per_node):
            node, local = divmod(rank, ranks_per_node)
            command = ["ip", "netns", "exec", self._names[node], sys.executable, str(script), *arguments]
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(local)}
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            ranks.append(subprocess.Popen(command, env=env, text=True, **pipes))
        try:
            outputs = [rank.communicate(timeout=timeout) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()
        failed = [errors for rank, (_, errors) in zip(ranks, outputs, strict=True) if rank.returncode]
        if failed:
            raise RuntimeError("\n".join(failed))
        return json.loads(outputs[0][0].splitlines()[-1])

    def _connect(self) -> None:
        first, second = self._names
        for name in self._names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", first, "link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", second)
        for number, name in enumerate(self._names, start=1):
            _run("ip", "-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", WIRE)
            _run("ip", "-n", name, "link", "set", WIRE, "up")
            if self._rate is not None:
                shape = ["tbf", "rate", self._rate, "burst", "512kb", "latency", "100ms"]
                _run("tc", "-n", name, "qdisc", "add", "dev", WIRE, "root", *shape)


def sent_over_the_wire() -> int:
    """Bytes that the kernel has sent from this node to the other, headers and acknowledgements included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == WIRE:
            return int(counters.split()[8])
    raise RuntimeError(f"this network namespace has no device {WIRE}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
