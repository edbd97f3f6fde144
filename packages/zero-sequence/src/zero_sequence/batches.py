"""Split a batch into sequence shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from .errors import SequenceError
from .loss import shift_labels

_TOKENS = ("input_ids", "inputs_embeds")
_FULL = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_IGNORED = -100


def split_batch(
    batch: Mapping[str, Any], ranks: int, *, shift: bool = True, pad_token_id: int | None = None
) -> list[dict[str, Any]]:
    """Return the shards of ``batch``, one for each of ``ranks`` ranks that share a sequence, in rank order.

    Tensors (batch, length, …) like ``input_ids`` are sharded along their length; other entries are the same in all
    shards. ``position_ids`` are added where they are missing: they count from 0, or in each packed sample that
    ``cu_seq_lens_q`` names. ``shift``: ``labels`` become ``shift_labels``, moved by one place before the sequence is
    sharded; without it (masked language models) they stay. ``pad_token_id``: the token with which a batch is padded if
    ``ranks`` do not divide its length, with label -100 and mask 0. Raises `SequenceError` for such a length without
    ``pad_token_id``, for a batch without tokens, and for masks that are not (batch, length).
    """
    full = dict(batch)
    tokens = next((full[name] for name in _TOKENS if isinstance(full.get(name), torch.Tensor)), None)
    if tokens is None or tokens.ndim < 2:
        raise SequenceError(f"expected a batch with input_ids of (batch, length), got {_describe(full)}")
    length = tokens.shape[1]
    mask = full.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim != 2:
        raise SequenceError(f"attention_mask: expected (batch, {length}), got {tuple(mask.shape)}")
    if full.get("position_ids") is None:
        full["position_ids"] = _counted_positions(full, tokens)
    if shift and full.get("labels") is not None and "shift_labels" not in full:
        full["shift_labels"] = shift_labels(full.pop("labels"), _IGNORED)
    missing = -length % ranks
    if missing and pad_token_id is None:
        raise SequenceError(
            f"a batch of length {length} does not split over {ranks} ranks: pad it to {length + missing}, or give "
            "pad_token_id"
        )
    along = [key for key, value in full.items() if _is_sequence(key, value, tokens)]
    if missing:
        _pad_entries(full, along, missing, pad_token_id or 0)
    shards = {key: full[key].chunk(ranks, dim=1) for key in along}
    return [{key: shards[key][rank] if key in shards else full[key] for key in full} for rank in range(ranks)]


def _is_sequence(key: str, value: Any, tokens: torch.Tensor) -> bool:
    """Return whether ``value``, the entry ``key`` of a batch, is to be sharded along dimension 1: a tensor with a value
    for every token, in one row or in as many rows as ``tokens`` (batch, length, ...) has. False for bounds and lengths
    of packed samples."""
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or key in _FULL:
        return False
    return value.shape[1] == tokens.shape[1] and value.shape[0] in (1, tokens.shape[0])


def _counted_positions(batch: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Return positions (batch, length) for ``tokens`` (batch, length, ...) that count from 0 in each row or, if
    ``batch`` has the bounds ``cu_seq_lens_q`` of packed samples, in each sample. Raises `SequenceError` if the bounds
    do not cover the batch."""
    rows, length = tokens.shape[:2]
    places = torch.arange(rows * length, device=tokens.device)
    bounds = batch.get("cu_seq_lens_q")
    if isinstance(bounds, torch.Tensor):
        starts = bounds.to(device=tokens.device, dtype=torch.long)
        if int(starts[0]) != 0 or int(starts[-1]) != rows * length:
            raise SequenceError(f"cu_seq_lens_q: expected bounds from 0 to {rows * length}, got {starts.tolist()}")
        places = places - starts[torch.searchsorted(starts, places, right=True) - 1]
        return places.view(rows, length)
    return (places % length).view(rows, length)


def _pad_entries(batch: dict[str, Any], along: list[str], missing: int, pad_token_id: int) -> None:
    """Append ``missing`` places of padding along dimension 1 to the tensors in ``batch`` whose keys are in ``along``,
    replacing them there: tokens get ``pad_token_id``, labels -100, positions continue, and others get 0.

    A batch without a mask gets none: in a causal model padding changes nothing before it; a bidirectional model needs
    a mask of the caller's.
    """
    fills = {"input_ids": pad_token_id, "labels": _IGNORED, "shift_labels": _IGNORED}
    for key in along:
        value = batch[key]
        if key == "position_ids":
            more = value[:, -1:] + torch.arange(1, missing + 1, device=value.device, dtype=value.dtype)
            batch[key] = torch.cat([value, more], dim=1)
        else:
            batch[key] = pad(value, (0, 0) * (value.ndim - 2) + (0, missing), value=fills.get(key, 0))


def _describe(batch: dict[str, Any]) -> str:
    """Return a batch as text for messages: the shapes of its tensors, other values as they are."""
    shapes = {key: tuple(value.shape) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    return str(shapes)
