"""Questions about the version of torch that scripts ask by DeepSpeed's names."""

from __future__ import annotations

import torch

from zero_core.errors import UsageError


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Return whether the version that runs, such as torch 2.8, is at least ``min_version`` and at most ``max_version``;
    None sets no bound. Raises `UsageError` if neither is given."""
    if min_version is None and max_version is None:
        raise UsageError("required_torch_version: give min_version, max_version or both")
    too_old = min_version is not None and torch.__version__ < str(min_version)  # torch compares as versions
    return not too_old and not (max_version is not None and torch.__version__ > str(max_version))
