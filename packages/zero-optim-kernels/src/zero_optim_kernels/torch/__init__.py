"""Optimizers for parameters in CPU memory: `torch.optim.Optimizer`s whose step is one native call per group."""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("zero_optim_kernels.torch needs torch; run: pip install 'zero-optim-kernels[torch]'") from error

from .adagrad import CPUAdagrad
from .adam import CPUAdam, CPUAdamW
from .lamb import CPULamb
from .lion import CPULion
from .sgd import CPUSGD

__all__ = ["CPUAdagrad", "CPUAdam", "CPUAdamW", "CPULamb", "CPULion", "CPUSGD"]
