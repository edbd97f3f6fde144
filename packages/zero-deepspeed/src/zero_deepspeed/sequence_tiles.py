"""DeepSpeed's names for compute in tiles, over `zero_sequence.tiled`.

Parameters are found in the graph of the computation, so ``compute_params`` is accepted everywhere and not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zero_sequence import SequenceError, tiled

Computes = Callable[..., torch.Tensor]


def sequence_tiled_compute(
    fn: Computes,
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Return ``fn(**kwargs_to_shard, **kwargs_to_pass)``, computed in ``shards`` tiles along dimension 1, reduced.

    ``kwargs_to_shard``: tensors (batch, ``seqlen``, …); those that require gradients get them,
    ``grad_requiring_tensor_key`` being one of their names. ``compute_params``: not read.
    ``output_unshard_dimension``: along which the tiles' outputs are joined; with 0 they are stacked, which suits
    losses. ``output_reduction``: "mean" or "sum" of the joined outputs, or None. Raises `SequenceError` for arguments
    that do not fit.
    """
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise SequenceError(
            f"grad_requiring_tensor_key: expected a name of kwargs_to_shard ({', '.join(kwargs_to_shard)}), got "
            f"{grad_requiring_tensor_key!r}"
        )
    sizes = {name: tensor.size(1) for name, tensor in kwargs_to_shard.items() if tensor.size(1) != seqlen}
    if sizes:
        raise SequenceError(f"kwargs_to_shard: expected a size of seqlen={seqlen} in dimension 1, got {sizes}")
    names = list(kwargs_to_shard)

    def of_tile(*tiles: torch.Tensor) -> torch.Tensor:
        """Return ``fn`` of one tile of each sharded argument, and of the other arguments."""
        return fn(**dict(zip(names, tiles, strict=True)), **kwargs_to_pass)

    outputs = tiled(
        of_tile,
        *kwargs_to_shard.values(),
        tiles=shards,
        dim=1,
        output_dim=output_unshard_dimension,
        stack=output_unshard_dimension == 0,
    )
    return outputs if output_reduction is None else _reduced(outputs, output_reduction)


class SequenceTiledCompute:
    """`sequence_tiled_compute` in the form of an autograd function's ``apply``, as in DeepSpeed: the names of the
    tensors and the tensors themselves are separate arguments."""

    @staticmethod
    def apply(
        fn: Computes,
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[torch.Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """Return the result of `sequence_tiled_compute`, which explains the arguments. ``args``: the values of
        ``keys_to_shard`` (names of ``kwargs_to_shard``), then those of ``keys_to_pass``."""
        count = len(keys_to_shard)
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args[:count], strict=True)),
            dict(zip(keys_to_pass, args[count:], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """An MLP in tiles, as an autograd function's ``apply``."""

    @staticmethod
    def apply(
        fn: Computes, self: Any, x: torch.Tensor, shards: int, compute_params: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return ``fn(self, x)``, computed in ``shards`` tiles along the last dimension but one of ``x``.

        ``self``: the module. ``compute_params``: not read.
        """
        return tiled(partial(fn, self), x, tiles=shards)


class TiledFusedLogitsLoss:
    """Logits and loss in tiles, as an autograd function's ``apply``."""

    @staticmethod
    def apply(
        fn: Computes,
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None,
        output_reduction: str,
    ) -> torch.Tensor:
        """Return the mean or sum over tiles of the losses ``fn(self, x, y)``, or ``fn(self, x, y, mask)`` with a mask.

        ``x``: hidden states (batch, sequence, …); ``y``: targets (batch, sequence, …); ``mask``: (batch, sequence) or
        None. Tiles are cut from the tokens of all samples, in order; ``fn`` gets them without the batch dimension, and
        its losses have no dimension. The mean counts every tile alike, whatever its number of tokens.
        ``compute_params``: not read. Raises `SequenceError` for shapes that do not fit.
        """
        given = [x, y] if mask is None else [x, y, mask]
        if any(tensor.dim() < 2 or tensor.shape[:2] != x.shape[:2] for tensor in given):
            raise SequenceError(
                "TiledFusedLogitsLoss: expected x, y and mask with equal batch and sequence dimensions, got "
                f"{', '.join(str(tuple(tensor.shape)) for tensor in given)}"
            )
        flat = [tensor.flatten(0, 1) for tensor in given]
        return _reduced(tiled(partial(fn, self), *flat, tiles=shards, dim=0, stack=True), output_reduction)


def _reduced(outputs: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the mean or the sum of ``outputs``. Raises `SequenceError` for another reduction."""
    if reduction not in ("mean", "sum"):
        raise SequenceError(f"output_reduction: expected 'mean' or 'sum', got {reduction!r}")
    return outputs.mean() if reduction == "mean" else outputs.sum()
