"""The process groups of an engine and their codecs, and the check that all ranks have the same configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from zero_comm import Codec, Control, EngineGroups, Ledger, Message, TreeSum
from zero_precision import BlockCodec, BlockFormat
from zero_settings import ConfigError, Problem

from . import kernels

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zero_settings import Config

_PER_RANK = (
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
    "comms_logger",
    "flops_profiler",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "aio",
    "offload.report",
    "offload.trace",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_param.nvme_path_weights",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_optimizer.nvme_path_weights",
)
"""Keys that may differ between ranks: reports, and each node's own disks."""
_PER_RANK_SECTIONS = tuple(f"{key}." for key in _PER_RANK)


def agree_on_configuration(control: Control, config: Config) -> None:
    """Compare the ranks' configurations, except keys for reports and each node's own drives. If they are not equal,
    raise `ConfigError` on every rank of ``control``, with each key that differs and its values by rank. Collective."""
    leaves = _leaves("", config.to_plain())
    own = {key: value for key, value in leaves if key not in _PER_RANK and not key.startswith(_PER_RANK_SECTIONS)}
    _agree(control, "configuration", own, "give every rank the same configuration")


def agree_on_hyperparameters(control: Control, optimizer: Optimizer | None) -> None:
    """Raise `ConfigError` on every rank unless the optimizers have the same class and the same numbers and strings in
    their param groups (learning rate, weight decay and so on). Collective."""
    groups = [] if optimizer is None else optimizer.param_groups
    own: dict[str, Any] = {"optimizer": None if optimizer is None else type(optimizer).__name__}
    for number, group in enumerate(groups):
        place = f"optimizer.param_groups[{number}]"
        for key, value in group.items():
            plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if key != "params" and isinstance(plain, (bool, int, float, str, tuple, list, type(None))):
                own[f"{place}.{key}"] = plain
    _agree(control, "optimizer", own, "make the optimizer with the same arguments on every rank")


def _agree(control: Control, what: str, own: dict[str, Any], action: str) -> None:
    """Raise `ConfigError` on every rank of ``control`` unless all of them pass equal values ``own``, by path. ``what``:
    what these are, for messages; ``action``: the error's advice. Collective."""
    texts = {path: repr(value) for path, value in own.items()}
    digest = hashlib.blake2b(json.dumps(texts, sort_keys=True).encode(), digest_size=16).hexdigest()
    if len(set(control.agree(Message("initialize", what, 0, digest)))) == 1:
        return
    told: list[dict[str, str]] = control.agree(Message("initialize", f"{what} that differs", 0, texts))
    paths = dict.fromkeys(path for texts in told for path in texts)
    problems = []
    for path in paths:
        values = [texts.get(path, "nothing") for texts in told]
        if len(set(values)) > 1:
            problems.append(Problem(path, "expected the same on every rank", _by_rank(values), action=action))
    raise ConfigError(*problems)


def _by_rank(values: list[str]) -> str:
    """Return text on ``values``, one for each rank, such as `0.1 on ranks 0, 2 and 0.2 on rank 1`; it lists 8 ranks per
    value."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return " and ".join(
        f"{value} on rank{'s' if len(held) > 1 else ''} {', '.join(held[:8])}{', …' if len(held) > 8 else ''}"
        for value, held in ranks.items()
    )


def _leaves(prefix: str, value: Any) -> list[tuple[str, Any]]:
    """Return (path, value) of all values in nested dicts that are no dicts or empty ones; ``prefix``: the outer
    path."""
    if not isinstance(value, dict) or not value:
        return [(prefix, value)]
    return [leaf for key, item in value.items() for leaf in _leaves(f"{prefix}.{key}" if prefix else str(key), item)]


_BLOCK: dict[BlockFormat, int] = {"int8": 256, "fp8_e4m3": 256, "int4": 512}
"""Elements that share a float32 scale, which adds at most 1.6 % to the codes."""


def open_groups(config: Config, rows: Sequence[Sequence[int]], ledger: Ledger) -> EngineGroups:
    """Open and return the process groups of an engine. ``rows``: the global ranks of each data-parallel group;
    ``ledger``: counts the bytes sent. Raises `ConfigError` on every rank of a row in which configurations differ.
    Collective over the world."""
    zero = config.zero_optimization
    return EngineGroups.open(
        rows,
        ledger=ledger,
        slice_sum=TreeSum(kernels.NativeSliceSum()) if config.virtual_ranks else kernels.NativeSliceSum(),
        deterministic=config.deterministic is not False,
        averages=not config.virtual_ranks and config.gradient_allreduce_op == "mean",
        ranks_per_node=config.comm.ranks_per_node,
        shard_size=zero.mics_shard_size if zero.mics_shard_size > 0 else None,
        secondary_size=zero.zero_hpz_partition_size if zero.stage >= 3 else 1,
        gradient_codec=_codec(config.comm.gradient_codec) if zero.zero_quantized_gradients else None,
        average_codec=_codec("int8") if zero.zero_quantized_gradients else None,
        stopped_after=config.comm.stopped_after,
        check=lambda control: agree_on_configuration(control, config),
    )


def weight_codecs(config: Config) -> tuple[Codec | None, Codec | None]:
    """Return (codec of trained units, codec of frozen units) for gathering at stage 3; None: gathered unquantized."""
    zero = config.zero_optimization
    codec = _codec(config.comm.weight_codec)
    return (
        codec if zero.zero_quantized_weights else None,
        codec if zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights else None,
    )


def codec_lines(config: Config, device: torch.device) -> list[str]:
    """Return a line for the start-up report on the codecs in use and their implementation; none without codecs."""
    zero, comm = config.zero_optimization, config.comm
    used = []
    if zero.stage >= 3 and (zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights):
        used.append(f"weights in {comm.weight_codec}")
    if zero.zero_quantized_gradients:
        used.append(f"gradients in {comm.gradient_codec}")
    return [f"codecs: {', '.join(used)}, by {kernels.NativeBlockQuantizer().describe(device)}"] if used else []


def shard_alignment(config: Config) -> int:
    """Return the number of elements that shard boundaries must be multiples of, so that no codec's block is divided."""
    zero, comm = config.zero_optimization, config.comm
    blocks = [64]
    if zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights:
        blocks.append(_BLOCK[comm.weight_codec])
    if zero.zero_quantized_gradients:
        blocks.append(_BLOCK[comm.gradient_codec])
    return max(blocks)  # all are powers of two


def _codec(name: BlockFormat) -> Codec:
    """Return the block codec of the 8-bit or 4-bit format ``name``."""
    return BlockCodec(name, block=_BLOCK[name], quantizer=kernels.NativeBlockQuantizer())
