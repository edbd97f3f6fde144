"""Limits on this process's memory, locked memory, shared memory and disk space, each with its source."""

from __future__ import annotations

import os
import re
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
    """``free`` bytes that may still be used under one limit, which ``source`` names. ``own``: the limit binds this
    process alone, so other processes of the job have no share in it.
    """

    source: str
    free: int
    own: bool = False


def memory_limits(root: Path = Path("/")) -> list[Limit]:
    """Return every limit on this process's memory: MemAvailable, each cgroup (v1 or v2) above it, RLIMIT_DATA and
    RLIMIT_AS.

    Page cache that the kernel can drop (inactive_file) does not count as used. ``root``: the folder that holds
    ``proc``.
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
    """Return RLIMIT_MEMLOCK less the memory already locked, as one limit; an empty list if unlimited or if CAP_IPC_LOCK
    lifts the limit. ``root``: the folder that holds ``proc``.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fields = _read_fields(root / "proc/self/status")
    if soft == resource.RLIM_INFINITY or int(fields.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
        return []
    locked = int(fields.get("VmLck", "0 kB").split()[0]) * 1024
    return [Limit("RLIMIT_MEMLOCK", max(0, soft - locked), own=True)]


def shared_limits(path: str = "/dev/shm") -> list[Limit]:
    """Return the free bytes of the shared-memory file system at ``path``, as one limit; an empty list if
    there is none.
    """
    return [Limit(path, disk_limit(path).free)] if os.path.isdir(path) else []


def disk_limit(path: str) -> Limit:
    """Return the free bytes, for this user, of the file system that ``path`` is or will be on; its folder need not
    exist.
    """
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    info = os.statvfs(folder)
    return Limit(f"free on {folder}", info.f_bavail * info.f_frsize)


def _mem_available(root: Path) -> int | None:
    """Return MemAvailable of /proc/meminfo in bytes; None if the file or the field is missing. ``root``: the folder
    that holds ``proc``.
    """
    text = _read_fields(root / "proc/meminfo").get("MemAvailable")
    return None if text is None else int(text.split()[0]) * 1024


def _read_fields(path: Path) -> dict[str, str]:
    """Return the ``key: value`` lines of a file as a dict; an empty dict if there is no such file."""
    if not path.exists():
        return {}
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _cgroup_limits(root: Path) -> list[Limit]:
    """Return the memory limits of this process's cgroup (v1 or v2) and of all groups above it, as far as they set one.
    ``root``: the folder that holds ``proc``. The list is empty if there are no cgroups.
    """
    listing, mounts = root / "proc/self/cgroup", root / "proc/self/mountinfo"
    if not listing.exists() or not mounts.exists():
        return []
    lines = (line.split(":", 2) for line in listing.read_text().splitlines())
    own = {controllers: path for _, controllers, path in lines}
    found: list[Limit] = []
    for kind, mount_root, mount_point in _cgroup_mounts(mounts.read_text()):
        path = own.get("") if kind == "v2" else next((p for c, p in own.items() if "memory" in c.split(",")), None)
        if path is None:
            continue
        for folder in _groups_up_from(root / mount_point.lstrip("/"), mount_root, path):
            limit = _limit_v2(folder) if kind == "v2" else _limit_v1(folder)
            if limit is not None:
                found.append(limit)
    return found


def _cgroup_mounts(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield ("v1" or "v2", root within the hierarchy, mount point) of each mount whose groups can limit memory;
    ``text``: the content of /proc/self/mountinfo.
    """
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        root, point = map(_unescaped, before.split()[3:5])
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            yield "v2", root, point
        elif kind == "cgroup" and "memory" in options.split()[-1].split(","):
            yield "v1", root, point


def _unescaped(path: str) -> str:
    """Return a path of /proc/self/mountinfo without its octal escapes of spaces, tabs and backslashes (``\\040``)."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _groups_up_from(mount: Path, mount_root: str, path: str) -> Iterator[Path]:
    """Yield the folders that exist from the group at ``path`` up to the mount; a container sees only groups below
    ``mount_root``, and for a group elsewhere only the mount is yielded.
    """
    relative = os.path.relpath(path, mount_root) if mount_root != "/" else path.lstrip("/")
    folder = mount if relative.startswith("..") else mount / relative
    while True:
        if folder.is_dir():
            yield folder
        if folder == mount:
            return
        folder = folder.parent


def _limit_v2(folder: Path) -> Limit | None:
    """Return the limit of the cgroup v2 in ``folder``: the lower of memory.max and memory.high, less what is used; None
    if neither is set. Page cache that can be dropped does not count as used.
    """
    bounds = [_read_number(folder / name) for name in ("memory.max", "memory.high")]
    used = _read_number(folder / "memory.current")
    if used is None or all(bound is None for bound in bounds):
        return None
    bound = min(bound for bound in bounds if bound is not None)
    used -= _stat_value(folder / "memory.stat", "inactive_file")
    return Limit(f"cgroup v2 {folder}", max(0, bound - used))


def _limit_v1(folder: Path) -> Limit | None:
    """Return the limit of the cgroup v1 in ``folder``, less what is used; None if it sets none. Page cache that can be
    dropped does not count as used.
    """
    bound, used = (_read_number(folder / f"memory.{name}_in_bytes") for name in ("limit", "usage"))
    if bound is None or used is None or bound >= _UNLIMITED:
        return None
    used -= _stat_value(folder / "memory.stat", "total_inactive_file")
    return Limit(f"cgroup v1 {folder}", max(0, bound - used))


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file or it says "max"."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdecimal() else None


def _stat_value(path: Path, key: str) -> int:
    """Return the value of ``key`` in a file of "key value" lines; 0 if there is no such file or key."""
    if not path.exists():
        return 0
    rows = (line.split() for line in path.read_text().splitlines())
    return next((int(row[1]) for row in rows if row[0] == key), 0)
