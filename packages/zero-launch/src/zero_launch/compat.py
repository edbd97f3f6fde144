"""Differences between versions of torch, one function each, which names the version."""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version of torch, from torch 2.8 on; its pre-releases count as the release."""


def shutdown_timeout(seconds: int) -> dict[str, int]:
    """Return the argument that bounds how long `LocalElasticAgent._shutdown` waits for ranks.

    torch before 2.12 has none: it waits up to 30 s, for ranks that are still there.
    """
    return {"timeout": seconds} if TORCH >= (2, 12) else {}
