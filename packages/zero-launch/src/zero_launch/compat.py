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


def gloo_thread_names(process_name: str) -> frozenset[str]:
    """Return the names under which the kernel may list the threads of gloo's process groups.

    ``process_name``: the kernel's name of this process, which before torch 2.11 its gloo threads may have too (in 2.8
    they have).
    """
    return frozenset({"pt_gloo_runloop"} if TORCH >= (2, 11) else {"pt_gloo_runloop", process_name})
