"""What the engine says once, at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_partition import Partition

    from .config import Config


def startup_report(config: Config, partition: Partition) -> str:
    """Stage, ranks, units, batch sizes, the dtype table, and every configuration value that is not a default."""
    options, layout = partition.options, partition.layout
    resident = sum(u.plan.resident for u in partition.units)
    lines = [
        f"ZeRO stage {options.stage}, {partition.world_size} rank(s) on {partition.device}",
        f"{layout.used_numel:,} parameters in {len(layout.units)} units ({resident} resident), "
        f"{layout.numel - layout.used_numel:,} elements of padding",
        f"batch {config.train_batch_size} = {config.train_micro_batch_size_per_gpu} "
        f"x {config.gradient_accumulation_steps} accumulation x {partition.world_size} rank(s)",
        str(options.policy),
    ]
    lines += [f"kept whole on every rank: '{name}', because {reason}" for name, reason in partition.uncut.items()]
    lines += [
        f"  {row.path} = {row.value!r} ({row.provenance}){'; ' + row.note if row.note else ''}"
        for row in config.report(defaults=False)
    ]
    return "\n".join(lines)
