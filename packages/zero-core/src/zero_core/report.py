"""What the engine says once, at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sharing import codec_lines

if TYPE_CHECKING:
    from zero_partition import Partition

    from .config import Config


def startup_report(config: Config, partition: Partition) -> str:
    """Stage, ranks, units, batch sizes, the dtype table, and every configuration value that is not a default."""
    options, layout = partition.options, partition.layout
    resident = sum(u.plan.resident for u in partition.units)
    lines = [
        f"ZeRO stage {options.stage}, {partition.data_world_size} rank(s) on {partition.device}" + _copies(partition),
        f"{layout.used_numel:,} parameters in {len(layout.units)} units ({resident} resident), "
        f"{layout.numel - layout.used_numel:,} elements of padding",
        f"batch {config.train_batch_size} = {config.train_micro_batch_size_per_gpu} "
        f"x {config.gradient_accumulation_steps} accumulation x {partition.data_world_size} rank(s)",
        *_rule(config),
        str(options.policy),
        *codec_lines(config, partition.device),
    ]
    lines += [f"kept whole on every rank: '{name}', because {reason}" for name, reason in partition.uncut.items()]
    lines += [
        f"  {row.path} = {row.value!r} ({row.provenance}){'; ' + row.note if row.note else ''}"
        for row in config.report(defaults=False)
    ]
    return "\n".join(lines)


def _rule(config: Config) -> list[str]:
    if config.elastic.batch_size is None:
        return []
    kept = "the samples of a step" if config.elastic.batch_size == "keep_global_batch" else "the samples of a rank"
    return [f"elastic.batch_size = {config.elastic.batch_size}: at another number of ranks {kept} stay the same"]


def _copies(partition: Partition) -> str:
    """How many copies of the model the ranks have, and which ranks keep one inside a node."""
    groups = partition.groups
    found = ""
    if groups.replicate.world_size > 1:
        found += f", {groups.replicate.world_size} copies over {partition.world_size} rank(s) each"
    if groups.secondary is not None:
        found += f", secondary shards over {groups.secondary.world_size} ranks"
        if groups.secondary.topology.far_peers(groups.secondary.rank):
            found += " of several nodes: backward gathers leave the node"
    return found
