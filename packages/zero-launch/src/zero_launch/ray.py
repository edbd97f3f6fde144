"""Training loops in the workers of a Ray cluster; Ray Train starts, restarts and connects the workers.

`pip install 'zero-launch[ray]'`. Nothing else in this package imports Ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

try:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
except ImportError as error:
    raise ImportError(f"zero_launch.ray needs Ray Train ({error}); pip install 'zero-launch[ray]'") from error

from zero_launch.orders import ORDERS_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

Loop = Callable[[dict[str, Any], str], Any]
"""A function that every worker runs: ``loop(config, checkpoints)``; see `torch_trainer`."""

__all__ = ["Loop", "torch_trainer"]


def torch_trainer(
    loop: Loop,
    config: Mapping[str, Any] | None = None,
    *,
    checkpoints: str | Path,
    scaling_config: ScalingConfig | None = None,
    torch_config: TorchConfig | None = None,
    **options: Any,
) -> TorchTrainer:
    """Return Ray's `TorchTrainer` for a loop around `zero_core.initialize`; ``fit()`` runs it.

    ``loop``: called in every worker with a copy of ``config`` and with ``checkpoints``. ``checkpoints``: folder for
    `engine.save_checkpoint`, from which `engine.resume` loads what an earlier attempt of the run saved; an absolute
    path that all workers see. ``torch_config``: how Ray makes the process group; by default with gloo and, if
    ``scaling_config`` uses GPUs, with NCCL for tensors on them. ``options``: further arguments of `TorchTrainer`; with
    ``run_config=RunConfig(failure_config=FailureConfig(max_failures=3))`` Ray starts all workers again when one dies.

    Raises ValueError if ``checkpoints`` is not an absolute path.
    """
    folder = os.fspath(checkpoints)
    if not os.path.isabs(folder):
        raise ValueError(
            f"checkpoints: expected an absolute path that all workers see, got {folder!r}: each worker runs in a "
            "folder of its own"
        )
    scaling = ScalingConfig() if scaling_config is None else scaling_config
    if torch_config is None:
        torch_config = TorchConfig(backend="cpu:gloo,cuda:nccl" if scaling.use_gpu else "gloo")

    def run(given: dict[str, Any]) -> Any:
        """Call ``loop`` with the configuration ``given`` by Ray, and return its result: what each worker runs."""
        os.environ.pop(ORDERS_VARIABLE, None)  # set if zero-launch started the Ray cluster
        return loop(given, folder)

    return TorchTrainer(
        run, train_loop_config=dict(config or {}), scaling_config=scaling, torch_config=torch_config, **options
    )
