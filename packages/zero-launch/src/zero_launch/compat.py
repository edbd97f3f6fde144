"""Differences between versions of torch: one name for each, whose docstring says the version."""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version of the installed torch, from torch 2.8 on; a pre-release counts as its release."""


def shutdown_timeout(seconds: int) -> dict[str, int]:
    """Return the keyword argument with which `LocalElasticAgent._shutdown` waits at most ``seconds`` for ranks to end.

    Empty for torch before 2.12, which always waits up to 30 s.
    """
    return {"timeout": seconds} if TORCH >= (2, 12) else {}
