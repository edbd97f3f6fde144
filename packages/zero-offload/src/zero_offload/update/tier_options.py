"""Options that say where masters and moments live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..swap_paths import NvmePath
from ._rules import OptimizerLike, find_rule
from ._slices import GRAIN

__all__ = ["TierOptions"]


@dataclass(frozen=True)
class TierOptions:
    """Options of the tier that keeps an update's masters and moments.

    ``tier="host"``: one block of host memory of exactly their size. ``tier="nvme"``: files under ``path`` (one folder,
    or several to stripe over, by their speed or by weights, see `SwapPaths`) behind a ring of ``buffer_count`` buffers,
    so that reading, computing and writing overlap; ``pipeline_read`` and ``pipeline_write`` false disable the overlap.
    ``tier="auto"``: the host if they fit, else ``path``, with a warning that shows the table of needs and limits.

    ``sub_group_size``: elements that are updated at a time. ``ratio``: the fraction of the elements, to the element (to
    the block of 256 with 8-bit states), that is in files, while the rest stays in host memory; with ``tier="host"`` the
    fraction in host memory, while the rest stays on the device, where torch's optimizer updates it if that is an
    accelerator (Twin-Flow). ``state_dtype`` of the moments: None for that of the update (float32, or float64 for
    float64), ``torch.bfloat16``, or ``torch.int8`` (a byte per element and a scale per 256). ``pin`` registers host
    memory with an accelerator.

    ``checksums`` are recorded as files are written, ``verify`` compares them on every read; ``prefix`` begins the file
    names: two updates in one folder need different ones. ``engine``: a ``zero_nvme_aio.Engine`` to share.
    """

    tier: Literal["host", "nvme", "auto"] = "host"
    path: NvmePath | None = None
    sub_group_size: int = 1 << 23
    buffer_count: int = 4
    pipeline_read: bool = True
    pipeline_write: bool = True
    ratio: float = 1.0
    state_dtype: torch.dtype | None = None
    pin: bool = True
    checksums: bool = True
    verify: bool = False
    prefix: str = "optimizer"
    engine: Any = None

    def __post_init__(self) -> None:
        """Raise ValueError, naming the option, for a value that is not allowed, and for a path without files or the
        reverse.
        """
        if self.tier not in ("host", "nvme", "auto"):
            raise ValueError(f"tier: expected 'host', 'nvme' or 'auto', got {self.tier!r}")
        if (self.tier == "host") != (self.path is None):
            raise ValueError(
                f"path: names the folder of tier='nvme' or 'auto' and only of those, "
                f"got tier={self.tier!r}, path={self.path!r}"
            )
        if self.sub_group_size < GRAIN:
            raise ValueError(f"sub_group_size: expected {GRAIN} elements or more, got {self.sub_group_size}")
        if self.buffer_count < 1:
            raise ValueError(f"buffer_count: expected 1 or more, got {self.buffer_count}")
        if not 0.0 <= self.ratio <= 1.0:
            raise ValueError(f"ratio: expected 0 to 1, got {self.ratio}")
        if self.state_dtype not in (None, torch.bfloat16, torch.int8):
            raise ValueError(f"state_dtype: expected None, torch.bfloat16 or torch.int8, got {self.state_dtype}")

    def check_device(self, device: torch.device, optimizer: OptimizerLike, *, beside: bool) -> None:
        """Raise ValueError if these options do not allow the update of ``optimizer``, with weights on ``device``.
        ``beside``: the update runs beside forward and backward.

        An optimizer without a kernel must have moments in the update's dtype, and cannot run ``beside``. The same holds
        if a part of the states stays on an accelerator (``tier="host"`` with a ``ratio`` below 1); then torch must also
        have the optimizer.
        """
        rule = find_rule(optimizer)
        name, stays = rule.template.__name__, self.tier == "host" and self.ratio != 1.0 and device.type != "cpu"
        if rule.run is None and self.state_dtype is not None:
            raise ValueError(f"state_dtype: expected None for {name}, which has no CPU kernel; got {self.state_dtype}")
        if rule.run is None and beside:
            raise ValueError(
                f"device: {name} has no CPU kernel, so it cannot update beside training (delayed_update, overlap)"
            )
        if not stays:
            return
        problem = ""
        if self.state_dtype is not None:
            problem = f"with moments in {self.state_dtype} (state_dtype), which torch's optimizers do not keep"
        elif beside:
            problem = "with an update beside training (delayed_update, overlap), which runs in host memory only"
        elif not rule.template.__module__.startswith("torch.optim."):
            problem = f"with {name}, which torch has no optimizer for"
        if problem:
            raise ValueError(f"ratio: expected 1 on {device} {problem}; got {self.ratio}")
