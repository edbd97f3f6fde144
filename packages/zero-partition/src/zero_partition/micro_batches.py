"""The micro-batches of a step: how they are taken from the user's iterable, given to a model, and how the loss is
found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from operator import length_hint
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .errors import PartitionError

_HAND_LOSS = "Pass train_batch a loss_fn that computes the loss from the output"

LossOf = Callable[[Any, Any], torch.Tensor]
"""Returns the loss, a scalar, of a model's output and its micro-batch."""


def agreed_micro_batches(
    batches: Iterable[Any],
    count: int,
    begun: int | None,
    agree: Callable[[str, str, Any], list[Any]],
    error: type[Exception],
) -> list[Any]:
    """Return the ``count`` micro-batches of a step: the next ones of ``batches`` if that is an iterator, or all items
    of another iterable. Collective.

    ``begun``: number of micro-batches that were counted since the last step; None where the user counts. ``agree``:
    exchanges what each rank finds (see `Runtime.agree`). Raises ``error`` on every rank if a rank cannot take them, or
    is inside an accumulation already.
    """
    if begun == 0:
        found, refused = _take_micro_batches(batches, count)
    else:
        counted = f"{begun} micro-batches are counted: end it by engine.step"
        how = "its boundary was set by hand" if begun is None else counted
        found, refused = [], f"expected the beginning of an accumulation, counted by the engine; {how}"
    for rank, told in enumerate(agree("train_batch", "micro-batches", refused)):
        if told is not None:
            raise error(f"engine.train_batch: rank {rank} {told}")
    return found


def _take_micro_batches(batches: Iterable[Any], count: int) -> tuple[list[Any], str | None]:
    """Return (``count`` micro-batches of ``batches``, None), or ([], why they cannot be taken, in words)."""
    expected = f"expected gradient_accumulation_steps = {count} micro-batches"
    advice = "Of a loader give iter(loader), the same one in each step"
    if isinstance(batches, (Mapping, torch.Tensor, str)) or not isinstance(batches, Iterable):
        return [], f"{expected}, a list of them or an iterator; got one {type(batches).__name__}"
    is_iterator = isinstance(batches, Iterator)
    if not is_iterator and (size := length_hint(batches, count)) != count:
        return [], f"{expected}, got {size}. {advice}"
    found, versions = [], []
    try:
        for batch in islice(batches, count if is_iterator else count + 1):
            found.append(batch)
            versions += [(len(found) - 1, t, t._version) for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
    except Exception as failure:
        return [], f"{expected}; making one raised {type(failure).__name__}: {failure}"
    if len(found) > count:
        return [], f"{expected}, got more. {advice}"
    if len(found) < count:
        return [], f"{expected}, got {len(found)} before the iterator ended; they are taken from it. Begin a new one"
    for number, tensor, version in versions:
        if tensor._version != version:
            return [], f"{expected}; micro-batch {number} was written over by the iterator. Give copies"
    return found, None


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """Return what ``model`` returns for ``batch``: it gets the items of a mapping as keywords, those of a list or tuple
    as arguments, and anything else as its one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_in(output: Any, _batch: Any) -> torch.Tensor:
    """Return the loss in a model's ``output``: its attribute or item "loss", the first of a tuple, or ``output``
    itself. A `LossOf`. Raises `PartitionError` for a mapping without "loss" and for an empty tuple."""
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise PartitionError(f"the model's output has no 'loss', only {', '.join(map(repr, output))}. {_HAND_LOSS}")
        output = output["loss"]
    elif isinstance(output, tuple):
        if not output:
            raise PartitionError(f"the model's output is an empty tuple, without a loss. {_HAND_LOSS}")
        output = output[0]
    found: torch.Tensor = getattr(output, "loss", output)
    return found
