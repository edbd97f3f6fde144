"""Which ranks share what, and in which form it travels: from a configuration to groups and codecs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zero_comm import Codec, EngineGroups, Ledger, TreeSum
from zero_precision import BlockCodec, BlockFormat

from . import kernels
from .agreement import agree_on_configuration

if TYPE_CHECKING:
    from .config import Config

_BLOCK: dict[BlockFormat, int] = {"int8": 256, "fp8_e4m3": 256, "int4": 512}
"""Elements that share a float32 scale, which adds at most 1.6 % to the codes."""


def open_groups(config: Config, rows: Sequence[Sequence[int]], ledger: Ledger) -> EngineGroups:
    """The groups of an engine over its data-parallel ``rows``. Collective over all ranks of the world.

    Raises `ConfigError` on every rank of a row where their configurations differ.
    """
    zero = config.zero_optimization
    return EngineGroups.open(
        rows,
        ledger=ledger,
        slice_sum=TreeSum(kernels.slice_sum()) if config.virtual_ranks else kernels.slice_sum(),
        deterministic=config.deterministic is not False,
        averages=not config.virtual_ranks,
        ranks_per_node=config.comm.ranks_per_node,
        shard_size=zero.mics_shard_size if zero.mics_shard_size > 0 else None,
        secondary_size=zero.zero_hpz_partition_size if zero.stage >= 3 else 1,
        gradient_codec=_codec(config.comm.gradient_codec) if zero.zero_quantized_gradients else None,
        average_codec=_codec("int8") if zero.zero_quantized_gradients else None,
        stopped_after=config.comm.stopped_after,
        check=lambda control: agree_on_configuration(control, config),
    )


def weight_codecs(config: Config) -> tuple[Codec | None, Codec | None]:
    """What units with and without trained parameters are gathered through at stage 3."""
    zero = config.zero_optimization
    codec = _codec(config.comm.weight_codec)
    return (
        codec if zero.zero_quantized_weights else None,
        codec if zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights else None,
    )


def codec_lines(config: Config, device: torch.device) -> list[str]:
    """Which codecs a run uses and what encodes on ``device``, in words; empty without codecs."""
    zero, comm = config.zero_optimization, config.comm
    used = []
    if zero.stage >= 3 and (zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights):
        used.append(f"weights in {comm.weight_codec}")
    if zero.zero_quantized_gradients:
        used.append(f"gradients in {comm.gradient_codec}")
    return [f"codecs: {', '.join(used)}, by {kernels.block_quantizer().describe(device)}"] if used else []


def shard_alignment(config: Config) -> int:
    """Elements of which shard boundaries are multiples, so that a codec's blocks are whole."""
    zero, comm = config.zero_optimization, config.comm
    blocks = [64]
    if zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights:
        blocks.append(_BLOCK[comm.weight_codec])
    if zero.zero_quantized_gradients:
        blocks.append(_BLOCK[comm.gradient_codec])
    return max(blocks)  # all are powers of two


def _codec(name: BlockFormat) -> Codec:
    return BlockCodec(name, block=_BLOCK[name], quantizer=kernels.block_quantizer())
