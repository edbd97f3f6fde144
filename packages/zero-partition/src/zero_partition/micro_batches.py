"""How a model is called with a micro-batch, and where its loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

LossOf = Callable[[Any, Any], torch.Tensor]
"""Returns the loss, a scalar, of a model's output and its micro-batch."""


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """Return what ``model`` returns for ``batch``: a mapping's items or a sequence's as arguments, or itself."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_in(output: Any, _batch: Any) -> torch.Tensor:
    """Return the loss in a model's ``output``: its attribute or item "loss", the first of a tuple, or itself."""
    if isinstance(output, Mapping):
        output = output["loss"]
    elif isinstance(output, tuple):
        output = output[0]
    found: torch.Tensor = getattr(output, "loss", output)
    return found
