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
    """Save the modules, optimizers, other stateful objects, tensors and plain data in `state` as checkpoint
    `<root>/<tag>`, and return that path; collective.

    `tag` is by default `step<step>`. `exclude_frozen` leaves out parameters that need no gradient; `keep_last` removes
    all but that many checkpoints; `config` is plain data to store; `node` names this rank's node where nodes share no
    file system. `coordinator`: how the ranks communicate, by default over the default process group. With a `saver` the
    state is written in the background. `zero_ckpt.torch.save` has the details. Raises CheckpointError on every rank
    when the save fails on any, or when torch is not installed.
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
    """Load a checkpoint of `root` into the modules, optimizers, other stateful objects, tensors and plain data in
    `state`, in place, and return which names were filled; collective.

    `tag` is by default the newest whole checkpoint. `rename` maps a model's name to the checkpoint's, or to None to
    keep it. `strict`: raise MismatchError unless all values of `state` are found, and everything in the checkpoint is
    wanted. `coordinator`: how the ranks communicate, by default over the default process group. `zero_ckpt.torch.load`
    has the details. Raises CheckpointError when torch is not installed or the load fails.
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
