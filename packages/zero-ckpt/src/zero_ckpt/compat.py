"""Differences between versions of torch, one function each, which names the version. Imports torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version of torch, from torch 2.8 on; its pre-releases count as the release."""


def recording_offsets() -> AbstractContextManager[object]:
    """Return the context in which `torch.load(map_location="meta")` notes each storage's position in the file.

    torch before 2.11 does so for fake tensors only.
    """
    if TORCH < (2, 11):
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode()
    return nullcontext()
