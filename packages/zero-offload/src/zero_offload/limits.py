"""Limits of what this process may take: memory, locked memory, shared memory and disk space, each with its source."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Limit", "disk_limit", "locked_limits", "memory_limits", "shared_limits"]

# A cgroup v1 without a limit reports the largest page-aligned number of 63 bits.
_UNLIMITED = 1 << 62
_CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class Limit:
    """Bytes that are ``free`` under one rule, and the rule's name. ``own``: it binds this process alone."""

    source: str
    free: int
    own: bool = False


def memory_limits(root: Path = Path("/")) -> list[Limit]:
    """Every bound on this process's memory: MemAvailable, each cgroup (v1 or v2) above it, RLIMIT_DATA and RLIMIT_AS.

    Page cache that the kernel can drop (inactive_file) does not count as used. ``root``: where /proc is looked for.
    """
    available = _mem_available(root)
    found = [Limit("MemAvailable", psutil.virtual_memory().available if available is None else available)]
    found += _cgroup_limits(root)
    status = psutil.Process().memory_info()
    for name, used in (("RLIMIT_DATA", status.data), ("RLIMIT_AS", status.vms)):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            found.append(Limit(name, max(0, soft - used), own=True))
    return found


def locked_limits(root: Path = Path("/")) -> list[Limit]:
    """RLIMIT_MEMLOCK less what is locked already; nothing when unlimited or the process may ignore it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fields = _fields(root / "proc/self/status")
    if soft == resource.RLIM_INFINITY or int(fields.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
        return []
    locked = int(fields.get("VmLck", "0 kB").split()[0]) * 1024
    return [Limit("RLIMIT_MEMLOCK", max(0, soft - locked), own=True)]


def shared_limits(path: str = "/dev/shm") -> list[Limit]:
    """Free bytes of the shared-memory file system; nothing where there is none."""
    return [Limit(path, disk_limit(path).free)] if os.path.isdir(path) else []


def disk_limit(path: str) -> Limit:
    """Free bytes, for this user, of the file system that ``path`` is or will be on."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    info = os.statvfs(folder)
    return Limit(f"free on {folder}", info.f_bavail * info.f_frsize)


def _mem_available(root: Path) -> int | None:
    text = _fields(root / "proc/meminfo").get("MemAvailable")
    return None if text is None else int(text.split()[0]) * 1024


def _fields(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _cgroup_limits(root: Path) -> list[Limit]:
    """The limits of the cgroup of this process and of all groups above it."""
    listing, mounts = root / "proc/self/cgroup", root / "proc/self/mountinfo"
    if not listing.exists() or not mounts.exists():
        return []
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in listing.read_text().split())}
    found: list[Limit] = []
    for kind, mount_root, mount_point in _cgroup_mounts(mounts.read_text()):
        path = own.get("") if kind == "v2" else next((p for c, p in own.items() if "memory" in c.split(",")), None)
        if path is None:
            continue
        for folder in _up(root / mount_point.lstrip("/"), mount_root, path):
            limit = _limit_v2(folder) if kind == "v2" else _limit_v1(folder)
            if limit is not None:
                found.append(limit)
    return found


def _cgroup_mounts(text: str) -> Iterator[tuple[str, str, str]]:
    """(version, root within the hierarchy, mount point) of each mount that can bound memory."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            yield "v2", root, point
        elif kind == "cgroup" and "memory" in options.split()[-1].split(","):
            yield "v1", root, point


def _up(mount: Path, mount_root: str, path: str) -> Iterator[Path]:
    """The folders from the group at ``path`` up to the mount; a container sees only what lies below ``mount_root``."""
    relative = os.path.relpath(path, mount_root) if mount_root != "/" else path.lstrip("/")
    folder = mount if relative.startswith("..") else mount / relative
    while True:
        if folder.is_dir():
            yield folder
        if folder == mount:
            return
        folder = folder.parent


def _limit_v2(folder: Path) -> Limit | None:
    bounds = [_number(folder / name) for name in ("memory.max", "memory.high")]
    used = _number(folder / "memory.current")
    if used is None or all(bound is None for bound in bounds):
        return None
    bound = min(bound for bound in bounds if bound is not None)
    used -= _stat(folder / "memory.stat", "inactive_file")
    return Limit(f"cgroup v2 {folder}", max(0, bound - used))


def _limit_v1(folder: Path) -> Limit | None:
    bound, used = (_number(folder / f"memory.{name}_in_bytes") for name in ("limit", "usage"))
    if bound is None or used is None or bound >= _UNLIMITED:
        return None
    used -= _stat(folder / "memory.stat", "total_inactive_file")
    return Limit(f"cgroup v1 {folder}", max(0, bound - used))


def _number(path: Path) -> int | None:
    """The number in a file; None for a file that is not there or says "max"."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdecimal() else None


def _stat(path: Path, key: str) -> int:
    if not path.exists():
        return 0
    rows = (line.split() for line in path.read_text().splitlines())
    return next((int(row[1]) for row in rows if row[0] == key), 0)
