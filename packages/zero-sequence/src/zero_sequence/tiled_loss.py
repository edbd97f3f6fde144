"""Cross entropy from hidden states and any head, in tiles: the whole logits never exist, forward or backward.

[Note: recomputed, not differentiated in forward] A tile's gradient could be computed in forward, so that backward only
scales it. That saves one of four products with the head's weights: the head and the loss take a fifth to a third less
time, and hold up to 1.6 times the memory (bench/bench_tiled_loss.py). The loss computes tiles again in backward
nevertheless. An engine would take a differentiation inside forward for a backward pass. The loss scale of float16 would
come too late for small gradients. Losses that are only looked at would pay for gradients, and a head's full gradient
would live from forward on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch

from .errors import SequenceError
from .tiled_entropy import EntropyTerms, gradient_of_losses, losses_of
from .tiled_modules import call_on, name_of
from .tiled_recompute import TileSpan, run_tiles, spans_of

Head = Callable[[torch.Tensor], torch.Tensor]


def tiled_cross_entropy(
    hidden: torch.Tensor,
    head: Head,
    labels: torch.Tensor,
    *,
    tile_tokens: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weight: torch.Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cross entropy of ``head(hidden)`` and ``labels``, computed in tiles of ``tile_tokens`` tokens.

    ``hidden``: (..., width). ``head``: called with (tokens, width), returns logits (tokens, classes): a Linear, or any
    module or function, with soft-capping or a scale for example; it is called, never looked into. ``labels``: class
    indices in the shape of ``hidden`` without its last dimension, already shifted; those equal to ``ignore_index``
    count for nothing. ``label_smoothing`` and ``weight`` (one per class) are those of
    `torch.nn.functional.cross_entropy`; ``z_loss`` adds its value times log(sum(exp(logits)))^2 to the loss of each
    token that counts. ``tokens_per_tile`` chooses ``tile_tokens`` from a budget of bytes.

    Reduction: "sum"; "mean", divided by the number of labels that count, or by the sum of their classes' weights; with
    ``num_items``, the sum divided by it, as in Transformers with its ``num_items_in_batch``. A mean over no label is
    NaN, as torch's, with zeros as gradients.

    The result has no dimension, and the logits' dtype or float32, whichever is wider: logits are widened before they
    are exponentiated. At any time one tile of logits and one copy in that dtype exist. Backward computes the tiles
    again, in order, with the random numbers and the autocast of forward; see `tiled` for what that means for gradients.

    Raises `SequenceError` for arguments that do not fit.
    """
    _check_arguments(hidden, labels, tile_tokens, label_smoothing, reduction, num_items)
    flat, targets = hidden.reshape(-1, hidden.size(-1)), labels.reshape(-1)
    terms = EntropyTerms(ignore_index, label_smoothing, z_loss, weight)
    divisor: int | float | torch.Tensor = 1
    if num_items is not None:
        divisor = num_items.to(hidden.device) if isinstance(num_items, torch.Tensor) else num_items
    elif reduction == "mean":
        divisor = terms.counts(targets).sum()
    total = run_tiles(_EntropyWork(head, targets, terms, spans_of(flat.size(0), tile_tokens)), [flat])
    return total / divisor


def _check_arguments(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    tile_tokens: int,
    label_smoothing: float,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
) -> None:
    """Raise `SequenceError`, saying what was expected, for arguments of `tiled_cross_entropy` whose shapes, dtypes,
    values or combination do not fit. Nothing is computed."""
    if hidden.shape[:-1] != labels.shape or hidden.dim() < 1:
        raise SequenceError(
            "tiled_cross_entropy: expected labels in the shape of the hidden states without their last dimension, got "
            f"{tuple(labels.shape)} for {tuple(hidden.shape)}"
        )
    if labels.is_floating_point():
        raise SequenceError(f"tiled_cross_entropy: expected labels of class indices, got {labels.dtype}")
    if tile_tokens < 1:
        raise SequenceError(f"tiled_cross_entropy: expected tile_tokens of 1 or more, got {tile_tokens}")
    if not 0 <= label_smoothing <= 1:
        raise SequenceError(f"tiled_cross_entropy: expected label_smoothing from 0 to 1, got {label_smoothing}")
    if reduction not in ("mean", "sum"):
        raise SequenceError(f"tiled_cross_entropy: expected the reduction 'mean' or 'sum', got {reduction!r}")
    if reduction == "sum" and num_items is not None:
        raise SequenceError("tiled_cross_entropy: num_items divides a sum itself; leave out reduction='sum'")


class _EntropyWork:
    """The `TileWork` that sums the losses of tokens. Inputs: the hidden states (tokens, width).

    ``head``: returns the logits. ``labels``: of all tokens, 1-D. ``terms``: of the loss. ``spans``: the tiles.
    """

    dim = 0

    def __init__(self, head: Head, labels: torch.Tensor, terms: EntropyTerms, spans: Sequence[TileSpan]) -> None:
        self.spans = spans
        self._head = head
        self._labels = labels
        self._terms = terms
        self._total: torch.Tensor | None = None

    def compute(self, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the head's logits (tokens, classes) for ``tiles``, one tile of hidden states in a list. Raises
        `SequenceError` if the logits have another shape."""
        logits = call_on(self._head, tiles)
        if logits.dim() != 2 or logits.size(0) != tiles[0].size(0):
            raise SequenceError(
                f"tiled_cross_entropy: expected {name_of(self._head)} to return logits ({tiles[0].size(0)}, classes) "
                f"for hidden states {tuple(tiles[0].shape)}, got {tuple(logits.shape)}"
            )
        return logits

    def collect(self, span: TileSpan, output: torch.Tensor) -> None:
        """Add the losses of the tokens of ``span`` to the sum; ``output``: their logits."""
        loss = losses_of(output, self._labels_at(span), self._terms).sum()
        self._total = loss if self._total is None else self._total + loss

    def take_result(self) -> torch.Tensor:
        """Return the sum of the losses, a 0-D tensor, and begin a new sum."""
        total, self._total = self._total, None
        return cast(torch.Tensor, total)

    def gradient_of(self, span: TileSpan, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the tile's logits ``output``; ``gradient``: that of the sum, a 0-D tensor."""
        labels = self._labels_at(span)
        return gradient_of_losses(output, labels, self._terms, gradient.expand(labels.shape))

    def _labels_at(self, span: TileSpan) -> torch.Tensor:
        """Return the labels of a tile's tokens (1-D, a view)."""
        return self._labels.narrow(0, span.start, span.length)
