"""Reports of an engine: at the start, of its configuration, and of its memory."""

from __future__ import annotations

from typing import Literal

from zero_partition import Partition
from zero_settings import Config

from .errors import UsageError
from .instruments import MEMORY_KINDS, memory_rows
from .process_groups import codec_lines
from .state import TrainingState


def startup_report(config: Config, partition: Partition) -> str:
    """Return the start-up report as text: stage, ranks, units, batch sizes, dtypes, codecs, replicated parameters, and
    settings that are not defaults."""
    lines = [
        *_outline(config, partition),
        *_elastic_rule(config),
        str(partition.options.policy),
        *codec_lines(config, partition.device),
    ]
    lines += [f"replicated on every rank: '{name}', because {reason}" for name, reason in partition.replicated.items()]
    lines += [
        f"  {row.path} = {row.value!r} ({row.provenance}){'; ' + row.note if row.note else ''}"
        for row in config.report(defaults=False)
    ]
    return "\n".join(lines)


def start_line(state: TrainingState) -> str:
    """Return one line on what begins: stage, ranks, units, batch sizes, dtypes, and what rank 0 holds on each tier."""
    rows = {row.thing: row.dtype for row in state.partition.options.policy.table()}
    dtypes = ", ".join(f"{thing} {rows[thing]}" for thing in ("parameter", "accumulated gradient", "master"))
    held = ", ".join(f"{n / 2**20:,.1f} MiB on {tier}" for tier, n in memory_report(state, "tier").items() if n)
    return "; ".join([*_outline(state.config, state.partition), dtypes, f"rank 0 holds {held or 'nothing'}"])


def counted(number: int, noun: str) -> str:
    """Return ``number`` with the noun, as in "1 rank" and "2 ranks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _outline(config: Config, partition: Partition) -> list[str]:
    """Return three lines: on stage and ranks, on parameters and units, on batch sizes."""
    options, layout = partition.options, partition.layout
    persistent = sum(u.plan.persistent for u in partition.units)
    data_parallel = counted(config.data_parallel_size, "rank")
    if config.sequence_parallel_size > 1:
        data_parallel = f"{counted(config.data_parallel_size, 'group')} of {config.sequence_parallel_size} ranks"
    return [
        f"ZeRO stage {options.stage}, {counted(partition.data_world_size, 'rank')} on {partition.device}"
        + _replicas(partition),
        f"{layout.used_numel:,} parameters in {counted(len(layout.units), 'unit')} ({persistent} persistent), "
        f"{layout.numel - layout.used_numel:,} elements of padding",
        f"batch {config.train_batch_size} = {config.train_micro_batch_size_per_gpu} "
        f"x {config.gradient_accumulation_steps} accumulation x {data_parallel}",
    ]


def _elastic_rule(config: Config) -> list[str]:
    """Return a line on which batch size elastic training keeps when the number of ranks changes; none if it is off."""
    if config.elastic.batch_size is None:
        return []
    kept = "the samples of a step" if config.elastic.batch_size == "keep_global_batch" else "the samples of a rank"
    return [f"elastic.batch_size = {config.elastic.batch_size}: at another number of ranks {kept} stay the same"]


def _replicas(partition: Partition) -> str:
    """Return text on how many replicas of the model there are and how many ranks share secondary shards; empty without
    either."""
    groups = partition.groups
    found = ""
    if groups.replicate.world_size > 1:
        found += f", {groups.replicate.world_size} copies over {counted(partition.world_size, 'rank')} each"
    if groups.secondary is not None:
        found += f", secondary shards over {groups.secondary.world_size} ranks"
        if groups.secondary.topology.far_peers(groups.secondary.rank):
            found += " of several nodes: backward gathers leave the node"
    return found


def config_report(config: Config) -> str:
    """Return every configuration value with its origin and remarks, as a table, one line each."""
    rows = [(r.path, repr(r.value), r.provenance, r.note) for r in config.report()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows
    )


def memory_report(state: TrainingState, by: Literal["kind", "unit", "tier"]) -> dict[str, int]:
    """Return the bytes of model state that this rank holds now, by kind, unit or tier. `UsageError` for another
    ``by``."""
    if by not in ("kind", "unit", "tier"):
        raise UsageError(f"engine.memory_report(by=…): expected 'kind', 'unit' or 'tier', got {by!r}")
    found = dict.fromkeys(MEMORY_KINDS, 0) if by == "kind" else {}
    for row in memory_rows(state.partition, state.optimizer):
        key = str(getattr(row, by))
        found[key] = found.get(key, 0) + row.nbytes
    return found
