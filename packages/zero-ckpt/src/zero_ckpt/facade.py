"""`save` and `load` for PyTorch, without importing torch before they are called."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .async_saver import AsyncSaver
from .errors import CheckpointError
from .report import LoadReport
from .types import Coordinator


def save(
    root: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int = 0,
    tag: str | None = None,
    exclude_frozen: bool = False,
    keep_last: int | None = None,
    config: Any = None,
    node: str | None = None,
    coordinator: Coordinator | None = None,
    saver: AsyncSaver | None = None,
) -> Path:
    """Save modules, optimizers and plain data as checkpoint `<root>/<tag>`, and return that path.

    It is `zero_ckpt.torch.save`, where the arguments are documented; collective. Raises CheckpointError when torch is
    not installed.
    """
    path: Path = _adapter().save(
        root,
        state,
        step=step,
        tag=tag,
        exclude_frozen=exclude_frozen,
        keep_last=keep_last,
        config=config,
        node=node,
        coordinator=coordinator,
        saver=saver,
    )
    return path


def load(
    root: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    tag: str | None = None,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    coordinator: Coordinator | None = None,
) -> LoadReport:
    """Load a checkpoint into modules, optimizers and plain data, in place, and return which names it filled.

    It is `zero_ckpt.torch.load`, where the arguments are documented; collective. Raises CheckpointError when torch is
    not installed.
    """
    report: LoadReport = _adapter().load(root, state, tag=tag, strict=strict, rename=rename, coordinator=coordinator)
    return report


def _adapter() -> ModuleType:
    """Return the module `zero_ckpt.torch`. Raises CheckpointError when torch is not installed."""
    try:
        from . import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise CheckpointError("save and load of torch objects need torch: pip install zero-ckpt[torch]") from error
    return torch
