"""Facts about a host: software, clock, memory, limits. Read by the check before a start and by the doctor."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch",
    "zero-ckpt",
    "zero-comm",
    "zero-core",
    "zero-launch",
    "zero-nvme-aio",
    "zero-offload",
    "zero-optim-kernels",
    "zero-partition",
    "zero-precision",
)


def versions() -> dict[str, str]:
    """Return package -> installed version, for torch and the zero packages; those that are not installed are left
    out."""
    import importlib.metadata  # not for every rank: it is slow to import

    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def greeting() -> dict[str, Any]:
    """Return the fields of the message `hello`: host, process and versions, without importing torch.

    `address` is the one by which ssh reached this host; empty without ssh.
    """
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "folder": os.getcwd(),
        "versions": versions(),
        "address": connection[2] if len(connection) == 4 else "",
    }


def memlock_bytes() -> int | None:
    """Return the bytes of memory that a process of this user may lock; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def examination(folder: str) -> dict[str, Any]:
    """Return the facts about this host for the doctor, as plain data by name: those of `greeting`, memory, limits,
    devices (`FROM_HOST` in messages.py has the fields).

    ``folder``: whose disk's free bytes to report. Memory and disk are in bytes; None for no limit, or no /dev/shm.
    Imports torch, and may start a process to ask zero-nvme-aio.
    """
    import psutil

    from zero_launch.cores import usable_cores

    memory = psutil.virtual_memory()
    shared = psutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        **greeting(),
        "cores": usable_cores(),
        "memory": memory.total,
        "memory_free": memory.available,
        "shared_memory_free": None if shared is None else shared.free,
        "memlock": memlock_bytes(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "free_port": free_port(),
        "disk_free": psutil.disk_usage(folder).free,
        **_torch_facts(),
        "io_engine": _io_engine(),
    }


def free_port() -> int | None:
    """Return a TCP port of the loopback interface that is free now; None when there is none. It is not reserved."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])
    except OSError:
        return None


def _torch_facts() -> dict[str, Any]:
    """Return `devices`, the names of torch's accelerators here, and `backends`, those of torch.distributed. If torch
    cannot be imported, both are empty, and `torch_error` says why."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return {"torch_error": str(error), "devices": [], "backends": []}
    devices = []
    if torch.accelerator.is_available():
        module = torch.get_device_module()
        devices = [str(module.get_device_name(index)) for index in range(torch.accelerator.device_count())]
    known = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "xccl": dist.is_xccl_available,
    }
    return {"devices": devices, "backends": [name for name, there in known.items() if there()]}


def _io_engine() -> str:
    """Return the I/O engine that zero-nvme-aio chooses here, or a text about why there is none; asks a new process."""
    if importlib.util.find_spec("zero_nvme_aio") is None:
        return "zero-nvme-aio is not installed"
    code = "import zero_nvme_aio; print(zero_nvme_aio.probe().chosen)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip()
    return f"probe failed: {(done.stderr.strip() or f'exit status {done.returncode}').splitlines()[-1]}"
