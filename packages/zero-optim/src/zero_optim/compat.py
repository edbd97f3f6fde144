"""Names that some versions of torch lack: one function for each, whose docstring says which version has it."""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version of torch, from torch 2.8 on; its pre-releases count as the release."""


def muon_class() -> type[torch.optim.Muon]:
    """Return `torch.optim.Muon`, which came with torch 2.9. Raises ImportError with an older torch."""
    if TORCH < (2, 9):
        raise ImportError(
            f"Muon needs torch 2.9 or later, this is torch {torch.__version__}: install a newer torch, or use AdamW"
        )
    return torch.optim.Muon
