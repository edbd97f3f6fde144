"""The command `ds_report`, and the table of DeepSpeed's operators that are available."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from . import VERSION, path
from .accelerator import get_accelerator
from .aio import is_available

COMPATIBLE: dict[str, bool] = {
    "async_io": is_available(),
    "cpu_adagrad": True,
    "cpu_adam": True,
    "cpu_lion": True,
    "deepspeed_not_implemented": False,
    "fused_adam": True,
    "fused_lamb": True,
    "fused_lion": True,
    "quantizer": False,
    "transformer": False,
    "transformer_inference": False,
    "utils": False,
}
"""DeepSpeed's name of an operator -> whether it is available."""

GIT_HASH = GIT_BRANCH = "zero-deepspeed"
INSTALLED: dict[str, bool] = {}
ACCELERATOR_NAME = ""
TORCH_INFO: dict[str, str | bool] = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "hip_version": torch.version.hip or "0.0",
    "nccl_version": "0.0",
}
"""The attributes of `deepspeed.git_version_info`: empty, or of the torch that runs, as nothing is built ahead of time.
There is no `nccl_version`: it is that of torch."""

_PACKAGES = (
    "zero-deepspeed",
    "zero-core",
    "zero-partition",
    "zero-offload",
    "zero-ckpt",
    "zero-comm",
    "zero-precision",
    "zero-nvme-aio",
    "zero-optim-kernels",
    "zero-launch",
    "torch",
)


def main() -> int:
    """Print versions, the device and the operators; return the exit status 0."""
    device = get_accelerator()
    print(f"deepspeed {VERSION}, answered by zero-deepspeed from {path()}")
    print(f"python {platform.python_version()} at {sys.executable}")
    for name in _PACKAGES:
        print(f"{name} {_version(name)}")
    print(f"device {device.device_name()}, {device.device_count()} here, {device.communication_backend_name()}")
    print(f"torch's threads: {torch.get_num_threads()}")
    for name, there in COMPATIBLE.items():
        print(f"operator {name}: {'yes' if there else 'no'}")
    return 0


def _version(name: str) -> str:
    """Return the installed version of the distribution ``name``, or "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
