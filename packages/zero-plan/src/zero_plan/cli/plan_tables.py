"""A plan as tables: what each rank needs, whether it fits on a machine, and how it compares with a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ..bounding import step_bounds
from ..comparing import ComparedRow
from ..fitting import judge_fit
from ..limits import step_time, wear
from ..machine import Machine
from ..planned import LoadedPlan, Peak, Plan, RankPlan, SavedPlan
from ..quantities import format_quantity
from .machine_printing import bounds_table, fits_table, wear_sentence
from .printing import TextTable, format_seconds


def plan_tables(found: Plan, machine: Machine | None) -> list[TextTable]:
    """Return the tables of what each rank of the plan ``found`` needs, and with ``machine`` also those of the least
    times and of what fits. Raises `PlanError` if the machine lacks a value that is needed for these.
    """
    tables: list[TextTable] = []
    for rank in found.ranks:
        title = f"rank {rank.rank} of {found.world_size}: "
        tables += _rank_tables(rank, title)
        if machine is not None:
            bounds = step_bounds(rank, machine, world_size=found.world_size)
            tables.append(bounds_table(bounds, step_time(bounds), title))
    if machine is not None:
        worn = wear(machine, found.written_per_node(int(machine.need("node.devices"))))
        fits = fits_table(judge_fit(found, machine).rows)
        tables.append(fits if worn is None else fits._replace(note=wear_sentence(worn)))
    return tables


def compared_table(rows: Iterable[ComparedRow], run: str) -> TextTable:
    """Return the table of planned and measured numbers and their errors; ``run``: the folder of the record, which the
    title names.
    """
    cells = tuple(
        (
            f"{row.rank}",
            row.what,
            _format_planned(row.planned, row.unit),
            _format_planned(row.measured, row.unit),
            "" if row.error is None else f"{row.error:+.1%}",
            "at least" if row.is_bound else "",
        )
        for row in rows
    )
    return TextTable(
        f"planned, and measured in {run}", ("rank", "what", "planned", "measured", "error", "plan says"), cells
    )


def _format_planned(value: float, unit: str) -> str:
    """Return ``value`` as text with ``unit``: bytes ("B") exactly, seconds ("s") with three digits."""
    return format_seconds(value) if unit == "s" else f"{value:,.0f} {unit}"


def _rank_tables(rank: RankPlan, title: str) -> Iterator[TextTable]:
    """Yield the tables of one rank's needs; ``title``: text before the title of each table."""
    held: Counter[tuple[str, str]] = Counter()
    for row in rank.held:
        held[row.kind, row.tier] += row.nbytes
    states = tuple((kind, tier, format_quantity(nbytes, "B")) for (kind, tier), nbytes in held.most_common())
    yield TextTable(title + "between two steps", ("what", "tier", "bytes"), states)
    yield from _peak_tables(rank.peaks, title)
    if rank.files:
        files = tuple((row.name, format_quantity(row.nbytes, "B")) for row in rank.files)
        worn = wear(None, rank.written)
        note = f"This rank writes {worn.terabytes_per_1000_steps:,.3g} TB per 1,000 steps." if worn else ""
        yield TextTable(title + "files", ("file", "bytes"), files, note)
    yield TextTable(title + "sent in a step", ("phase", "calls", "bytes", "of which leave the node"), _sent_rows(rank))
    links = [(link, format_quantity(nbytes, "B")) for link, nbytes in rank.bytes_by_link().items()]
    flops = [(f"operations in {dtype}", format_quantity(count, "FLOP")) for dtype, count in sorted(rank.flops.items())]
    yield TextTable(title + "moved and computed in a step", ("link", "amount"), (*links, *flops))
    if rank.saved is not None:
        yield from _save_tables(rank.saved, title)
    if rank.loaded is not None:
        yield from _load_tables(rank.loaded, title)


def _peak_tables(peaks: Iterable[Peak], title: str) -> Iterator[TextTable]:
    """Yield for each peak of memory a table of its largest owners; ``title``: text before the title of each table."""
    for peak in peaks:
        yield TextTable(
            title + f"{format_quantity(peak.nbytes, 'B')} of {peak.tier} at the peak, {peak.phase}, {peak.place}",
            ("what", "of", "bytes"),
            tuple((row.kind, row.name, format_quantity(row.nbytes, "B")) for row in peak.owners),
        )


def _save_tables(saved: SavedPlan, title: str) -> Iterator[TextTable]:
    """Yield the tables of saving a checkpoint: peaks of memory, files; ``title``: text before the title of each
    table.
    """
    yield from _peak_tables(saved.peaks, title)
    rows = [
        (row.name, format_quantity(row.nbytes, "B"), "linked" if row.name in saved.linked else "written")
        for row in saved.files
    ]
    rows.append(("messages, in host memory", format_quantity(saved.message_nbytes, "B"), "sent"))
    if saved.copied_nbytes:
        rows.append(("copies, in host memory", format_quantity(saved.copied_nbytes, "B"), "kept"))
    written = format_quantity(saved.written, "B")
    yield TextTable(title + f"a save, which writes {written}", ("file", "bytes", "how"), tuple(rows))


def _load_tables(loaded: LoadedPlan, title: str) -> Iterator[TextTable]:
    """Yield the tables of one rank's load of a checkpoint: the peaks of memory by tier, and the bytes read and written;
    ``title``: text before the title of each table.
    """
    yield from _peak_tables(loaded.peaks, title)
    rows = (
        ("read from the checkpoint", format_quantity(loaded.read, "B")),
        ("written to the tier on NVMe", format_quantity(loaded.written, "B")),
        ("slices read for a part of them, in host memory, at most", format_quantity(loaded.scratch_nbytes, "B")),
    )
    yield TextTable(title + f"loading a checkpoint of world size {loaded.saved_by}", ("what", "bytes"), rows)


def _sent_rows(rank: RankPlan) -> tuple[tuple[str, str, str, str], ...]:
    """Return the rows of the table of sent bytes, one per phase of a step: phase, calls, sent bytes, bytes that leave
    the node.
    """
    sums: dict[str, list[int]] = {}
    for row in rank.sent:
        phase = sums.setdefault(row.phase, [0, 0, 0])
        for index, number in enumerate((row.calls, row.sent_bytes, row.across_bytes)):
            phase[index] += number
    return tuple(
        (name, f"{calls:,}", format_quantity(sent, "B"), format_quantity(across, "B"))
        for name, (calls, sent, across) in sums.items()
    )
