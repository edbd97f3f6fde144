"""The blocks `gathered` and `gathered_anywhere`, in which the user reads and edits full parameters outside a pass.

``partition`` is the sharded model. A data rank is a rank's number among the ranks of all replicas of the model. A
modifier rank is the one whose values all ranks take over at the end of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from zero_comm import Tag

from .errors import EditRefusedError, PartitionError
from .live import UnitState
from .partition import Partition, owner_of
from .replaced_memory import copy_replaced, find_misfits
from .sharded_parameter import sharded_record
from .unit import Unit


@contextmanager
def gathered(
    partition: Partition,
    parameters: nn.Parameter | Iterable[object],
    modifier_rank: int | None = None,
    *,
    read_only: bool = False,
) -> Iterator[None]:
    """Gather the units of ``parameters`` for the block: one parameter or an iterable, in which objects that are no
    parameter of this model are ignored.

    ``modifier_rank``: at exit, the values of all parameters of these units on this data rank, written in place or by
    assigning ``p.data``, become every rank's; `EditRefusedError` on every rank for another shape or another's memory.
    Without it a change is kept if every rank has made the same; else the next call of the engine raises
    `EditRefusedError` on every rank. ``read_only``: the block changes nothing, so changes are not looked for. Passes in
    the block leave the units gathered. At exit they are released, unless an enclosing block has them too. If the block
    raises, nothing is broadcast, and with a ``modifier_rank`` the engine may end, as other ranks wait for this one.
    Collective. Raises `PartitionError` inside a pass, and at exit if a buffer of the model lies in the gathered memory.
    """
    runtime = partition.runtime
    runtime.reopen("gathered")
    if runtime.gathers.active:
        raise PartitionError(
            "gathered(...) was opened inside a forward or backward pass; open it before or after the pass"
        )
    given: Iterable[object] = [parameters] if isinstance(parameters, nn.Parameter) else parameters
    units = _units_of(partition, given)
    watched = modifier_rank is None and not read_only
    runtime.agree("gathered", ",".join(str(u.index) for u in units), None)
    try:
        partition.finish_updates()
        opened = [u for u in units if u.releasable and u.state is UnitState.RELEASED]
        for unit in opened:
            unit.issue_gather(runtime.step, exact=True)
        for unit in opened:
            unit.wait_gather()
    except BaseException as failure:  # the others wait in the gathers
        runtime.failed_in("gathered", failure, awaited=True)
        raise
    held = [u for u in units if u.releasable]
    for unit in held:
        unit.pin()
    runtime.released_use.gathered(held)
    for unit in units if watched else ():
        unit.edits.record_checksums(unit.views)
    try:
        yield
        if modifier_rank is not None:
            _refuse_misfits(partition, units, modifier_rank)
            with runtime.writing("gathered", weights=True):
                copy_replaced(units)
                for unit in units:
                    _broadcast_changes(partition, unit, modifier_rank)
        elif watched:
            runtime.edits.note_ties()
    except EditRefusedError:  # every rank raises it
        raise
    except BaseException as failure:
        runtime.failed_in("gathered", failure, awaited=modifier_rank is not None)
        raise
    finally:
        released = [unit for unit in held if unit.pins == 1]
        try:
            partition.refuse_buffers_in(released)
        finally:
            for unit in held:
                unit.unpin()


@contextmanager
def gathered_anywhere(parameters: nn.Parameter | Iterable[object], modifier_rank: int | None = None) -> Iterator[None]:
    """Gather parameters of any engine, and of models built inside `Init` that no engine owns yet, for the block.

    ``parameters``: one or an iterable, in which other objects are ignored. ``modifier_rank``: the data rank whose
    values become every rank's at exit. Without it, changes to an engine's parameters are kept if every rank has made
    the same, else refused later, and changes to parameters that no engine owns are dropped if they were sharded before
    the block. Collective: in the same order on every rank. Raises as `gathered` does; without an engine also
    `DesyncError` where ranks give other parameters in an open `Init`, and `ReleasedParameterError`.
    """
    given = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    found = {r.number: r for p in given if (r := sharded_record(p)) is not None}
    built = [found[number] for number in sorted(found)]  # every rank gathers in the same order
    owners = {id(owner): owner for p in given if (owner := owner_of(p)) is not None}
    with ExitStack() as stack:
        for owner in owners.values():
            stack.enter_context(gathered(owner, given, modifier_rank))
        if built:
            built[0].meet(built[1:])
        released = [record for record in built if not record.is_full]
        for record in released:
            record.gather()
            record.pinned = True
        try:
            yield
            if modifier_rank is not None:
                if built:
                    built[0].meet(built[1:])
                for record in built:
                    record.broadcast_from(modifier_rank)
                for record in released:
                    record.reshard()
        finally:
            for record in released:
                record.pinned = False
                record.forget_changes()


def _units_of(partition: Partition, parameters: Iterable[object]) -> list[Unit]:
    """Return the units that hold ``parameters``, each once, in the order of their indices. Objects that are no
    parameter of this model are ignored."""
    found = {}
    for parameter in parameters:
        place = partition.find(parameter) if isinstance(parameter, nn.Parameter) else None
        if place is not None:
            found[place[0].index] = place[0]
    return [found[index] for index in sorted(found)]


def _refuse_misfits(partition: Partition, units: list[Unit], modifier_rank: int) -> None:
    """Raise `EditRefusedError` on every rank if data rank ``modifier_rank`` has given a parameter of ``units`` another
    shape, or memory that it shares with another parameter. Collective.

    If it raises, the parameters of all ``units`` are views of the flat buffers again, and user code's changes to them
    no longer count as changes.
    """
    misfits = find_misfits(units) if partition.data_rank == modifier_rank else []
    misfit = partition.runtime.agree("changes in gathered", "", misfits[:1])[modifier_rank]
    if misfit:
        for unit in units:
            unit.restore_views()
            unit.edits.mark_clean()
        raise EditRefusedError(f"{misfit[0]}. It was on rank {modifier_rank}. Nothing was taken over.")


def _broadcast_changes(partition: Partition, unit: Unit, modifier_rank: int) -> None:
    """Overwrite the gathered flat buffer of ``unit`` with that of data rank ``modifier_rank``, and then this rank's
    shard and master with it. Collective; returns when the values are there.

    Before that, a parameter whose ``data`` was assigned becomes a view of the flat buffer again; the assigned values
    are copied there if they have the parameter's shape, else lost. Changes by user code that were noted for the unit
    count as settled.
    """
    for parameter, view in zip(unit.parameters, unit.views, strict=True):
        if not parameter.is_set_to(view) or parameter.dtype is not view.dtype:
            if parameter.shape == view.shape:
                view.copy_(parameter.data)
            parameter.data = view
    partition.groups.broadcast(unit.flat, modifier_rank, Tag("broadcast", unit.name, partition.runtime.step))
    unit.write_back()
    unit.edits.mark_clean()
