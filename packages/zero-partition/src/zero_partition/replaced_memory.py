"""Find replaced parameters, whose ``.data`` user code has put over other memory: refuse ties, copy values from weights.

A parameter is replaced if its memory is neither its placeholder nor its view of the unit's flat buffer. Two are tied if
they share elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .host_facts import is_plain, storage_address
from .live import UnitState
from .shared_storage import first_sharing
from .unit import Unit
from .unit_edits import without_torch_function

TIED = (
    "shares memory with parameter '{}' since its `.data` was set, but an engine trains the two apart: tie them by "
    "identity (`model.b.weight = model.a.weight`), or copy (`b.data = a.data.clone()`)"
)


@without_torch_function
def find_tied(units: Iterable[Unit]) -> tuple[Unit, int, str] | None:
    """Find the first parameter of ``units`` that user code has put over the memory of another one (``a.data =
    b.data``).

    Return its unit, its index in the unit, and the problem as the rest of a sentence about the parameter; None if no
    replaced parameter shares elements with another. Hidden units (`Unit.hidden`), whose parameters read NaN for a time,
    and placeholders are passed over.
    """
    places = {name: (unit, number) for unit in units for number, name in enumerate(unit.names) if not unit.hidden}
    replaced = {name for name, (unit, number) in places.items() if _is_replaced(unit, number)}
    if not replaced:
        return None
    pair = first_sharing(
        {
            name: unit.parameters[number].detach()
            for name, (unit, number) in places.items()
            if name in replaced or unit.state is UnitState.GATHERED
        }
    )
    if pair is None:
        return None
    name, other = pair if pair[0] in replaced else pair[::-1]
    return (*places[name], TIED.format(other))


@without_torch_function
def find_misfits(units: Iterable[Unit]) -> list[str]:
    """Return a sentence about each gathered parameter of ``units`` whose new memory the engine cannot take values from:
    one of another shape, or one that is tied to another parameter (of these only the first). Empty if there are none.
    """
    units = list(units)
    found = [
        f"parameter '{name}' was given a tensor of shape {tuple(parameter.shape)}, expected {tuple(view.shape)}"
        for unit in units
        for name, parameter, view in zip(unit.names, unit.parameters, unit.views, strict=True)
        if parameter.shape != view.shape
    ]
    if (tied := find_tied(units)) is not None:
        unit, number, problem = tied
        found.append(f"parameter '{unit.names[number]}' {problem}")
    return found


@without_torch_function
def copy_replaced(units: Sequence[Unit]) -> None:
    """Give each replaced parameter whose values lie in the flat buffers of ``units`` a copy of them as its ``.data``,
    as these buffers are about to be written."""
    flats = {storage_address(unit.flat) for unit in units}
    for unit in units:
        for number, parameter in enumerate(unit.parameters):
            given = parameter.detach()
            if _is_replaced(unit, number) and _lies_in(given, flats):
                parameter.data = given.clone()


@without_torch_function
def copy_pending(units: Sequence[Unit]) -> None:
    """Replace by copies the pending values of ``units`` (`UnitEdits.pending`) that lie in the flat buffers of
    ``units``, as these are about to be written."""
    flats = {storage_address(unit.flat) for unit in units}
    for unit in units:
        for number, values in unit.edits.pending.items():
            if values is not None and _lies_in(values, flats):
                unit.edits.pending[number] = values.clone()


def _is_replaced(unit: Unit, number: int) -> bool:
    """Return whether user code has replaced the parameter with index ``number`` in ``unit``."""
    kept = unit.placeholders[0].views if unit.state is UnitState.RELEASED else unit.views
    return not unit.parameters[number].is_set_to(kept[number])


def _lies_in(tensor: torch.Tensor, storages: set[int]) -> bool:
    """Return whether ``tensor`` is strided and its storage is one of ``storages`` (addresses)."""
    return is_plain(tensor) and tensor.layout == torch.strided and storage_address(tensor) in storages
