"""Masks over the full sequence, made while the model sees a shard of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .errors import SequenceError
from .inputs import ForwardInputs, SequenceInputs

Mask = Callable[..., Any]


class FullMask:
    """The mask function that is registered with Transformers in place of ``core``, the one of the model's attention,
    which it calls with the full sequence.

    A model asks for a mask over the shard that it sees. Its pattern (causal, sliding, bidirectional) is a function of
    positions in a sequence, which holds for the full one too; padding and packed samples are taken from ``inputs``.
    """

    def __init__(self, core: Mask, inputs: SequenceInputs) -> None:
        self._core = core
        self._inputs = inputs

    def __call__(self, *, mask_function: Mask, attention_mask: torch.Tensor | None = None, **named: Any) -> Any:
        """Return the mask of the full sequence, as ``core`` makes it; outside of a forward pass over shards, the mask
        that ``core`` makes for the arguments as they are.

        ``mask_function``: the pattern. ``attention_mask``: the padding that the model knows of. ``named``: the further
        arguments of a mask function of Transformers. Raises `SequenceError` for a pattern that depends on tensors of
        the shard.
        """
        current = self._inputs.current
        if current is None:
            return self._core(mask_function=mask_function, attention_mask=attention_mask, **named)
        if named.get("use_vmap") or any(tensor.ndim > 1 for tensor in _tensors_in(mask_function)):
            raise SequenceError(
                "the model makes its attention mask from further tensors of the sequence (a custom mask function, "
                "block or image tokens), of which a rank has a shard only: expected a causal, sliding, chunked or "
                "bidirectional mask with padding or packed samples"
            )
        packed = None if "allow_is_bidirectional_skip" in named else _packed_samples(current)
        if packed is not None:
            from transformers.masking_utils import (
                and_masks,
                packed_sequence_mask_function,
                remap_positions_for_packed_sequence,
            )

            positions = current.positions.expand(named["batch_size"], -1)  # type: ignore[union-attr]
            inside = remap_positions_for_packed_sequence(mask_function, positions)
            samples = packed_sequence_mask_function(packed.expand(named["batch_size"], -1))
            mask_function = and_masks(inside, samples)
            named["allow_is_causal_skip"] = False
        full = {"q_length": current.full_length, "kv_length": current.full_length, "q_offset": 0, "kv_offset": 0}
        return self._core(mask_function=mask_function, attention_mask=current.padding, **{**named, **full})


def check_mask(mask: Any, full_length: int, place: str) -> None:
    """Raise `SequenceError` unless ``mask``, of the attention called ``place``, is over the full sequence of
    ``full_length`` tokens: (batch, length), or (batch, 1, length, length). None passes."""
    shape = tuple(getattr(mask, "shape", ()))
    fits = shape[-1:] == (full_length,) and (len(shape) == 2 or (len(shape) == 4 and shape[-2] == full_length))
    if mask is not None and (not fits or (len(shape) == 4 and shape[1] != 1)):
        raise SequenceError(
            f"{place}: expected a mask over the full sequence, (batch, 1, {full_length}, {full_length}) or (batch, "
            f"{full_length}), got one of shape {shape}; give the model a mask of padding (batch, length), or none"
        )


def _packed_samples(current: ForwardInputs) -> torch.Tensor | None:
    """Return, for rows of several packed samples, the index in its row of the sample that each token belongs to (batch,
    full length); None if each row is one sample, if a mask was given, and without positions."""
    from transformers.masking_utils import find_packed_sequence_indices

    if current.positions is None or current.padding is not None:
        return None
    found: torch.Tensor | None = find_packed_sequence_indices(current.positions)
    return found


def _tensors_in(function: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the closure of a mask function, also those in lists and tuples, and in the closures of the
    functions found there."""
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for item in held if isinstance(held, (tuple, list)) else (held,):
            if isinstance(item, torch.Tensor):
                yield item
            elif callable(item):
                yield from _tensors_in(item)
