"""The head of a record: command, configuration, versions and machine."""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from zero_settings import Config

_SECRET = ("comet.",)
_PACKAGES = (
    "zero-core",
    "zero-partition",
    "zero-comm",
    "zero-offload",
    "zero-ckpt",
    "zero-nvme-aio",
    "zero-optim-kernels",
    "zero-report",
    "zero-deepspeed",
    "transformers",
    "accelerate",
    "lightning",
    "numpy",
)


def head_facts(config: Config, device: torch.device) -> dict[str, Any]:
    """Return by name what the head of a record says: title, command, configuration with origins (no secrets), versions,
    machine."""
    rows = [row for row in config.report() if not row.path.startswith(_SECRET)]
    return {
        "title": Path(sys.argv[0]).name or "run",
        "command": sys.argv,
        "configuration": [[row.path, _plain(row.value), row.provenance, row.note] for row in rows],
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **_versions()},
        "machine": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
            **_accelerator(device),
        },
    }


def _versions() -> dict[str, str]:
    """Return, by name, the versions of this project's packages and a few others that this process has imported."""
    found = {}
    for package in _PACKAGES:
        if package.replace("-", "_") in sys.modules:
            try:
                found[package] = version(package)
            except PackageNotFoundError:  # run from its sources
                module = sys.modules[package.replace("-", "_")]
                found[package] = str(getattr(module, "__version__", "from its sources"))
    return found


def _accelerator(device: torch.device) -> dict[str, Any]:
    """Return facts by name: the device's type and, for an accelerator, how many there are, its name and CUDA
    version."""
    if device.type == "cpu":
        return {"device": "cpu"}
    found: dict[str, Any] = {"device": device.type, "accelerators": torch.accelerator.device_count()}
    if device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
        found["CUDA"] = torch.version.cuda
    return found


def _plain(value: Any) -> Any:
    """Return ``value`` if it is a number, a string or None; else as text, the items of a list joined by commas."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
