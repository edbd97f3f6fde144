"""Machines on one machine: network namespaces on a bridge. Needs root. Nothing of the machine's own network is touched.

A namespace is called PREFIX, the number of the process that made it, and a word.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

import psutil


def ip(*arguments: str) -> None:
    """Run `ip`; raise CalledProcessError if it fails."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def connect(front: str, namespaces: Mapping[str, str], network: str) -> None:
    """Make the namespace ``front`` with a bridge at ``network``.254, and ``namespaces``, by host name, at .1, .2, …;
    each is joined to the bridge by a link that has the host's name there and is `net0` inside."""
    for namespace in (front, *namespaces.values()):
        ip("netns", "add", namespace)
        ip("-n", namespace, "link", "set", "lo", "up")
    ip("-n", front, "link", "add", "bridge0", "type", "bridge")
    ip("-n", front, "addr", "add", f"{network}.254/24", "dev", "bridge0")
    ip("-n", front, "link", "set", "bridge0", "up")
    for number, (name, namespace) in enumerate(namespaces.items(), start=1):
        ip("-n", front, "link", "add", name, "type", "veth", "peer", "name", "net0", "netns", namespace)
        ip("-n", front, "link", "set", name, "master", "bridge0", "up")
        ip("-n", namespace, "addr", "add", f"{network}.{number}/24", "dev", "net0")
        ip("-n", namespace, "link", "set", "net0", "up")


def inside(namespace: str) -> list[psutil.Process]:
    """Return the processes that run in a namespace."""
    listing = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
    found = []
    for pid in map(int, listing.split()):
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                process.name(), process.cmdline()
                found.append(process)
        except psutil.Error:
            continue
    return found


def remove(namespace: str) -> None:
    """Kill what runs in a namespace, and delete it."""
    for process in inside(namespace):
        process.kill()
    subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def remove_stale(prefix: str) -> None:
    """Remove what a test run left that was killed itself."""
    for line in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines():
        match = re.match(rf"{prefix}(\d+)[a-z]\w*", line)
        if match is not None and not psutil.pid_exists(int(match[1])):
            remove(match[0])


def refused() -> str | None:
    """Return why there can be no network namespaces here; None when there can."""
    probe = subprocess.run(
        ["unshare", "-n", "ip", "link", "add", "net0", "type", "veth"], capture_output=True, text=True
    )
    return None if probe.returncode == 0 else f"no network namespaces here: {probe.stderr.strip()}"
