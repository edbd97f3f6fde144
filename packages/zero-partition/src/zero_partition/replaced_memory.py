"""Parameters that user code has put over the memory of other weights: copies of their values, and refusals of ties."""

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
    """Find the first parameter of ``units`` that user code has put over memory of another one (``a.data = b.data``).

    Return its unit, its number there, and the problem as the rest of a sentence about the parameter; None if no
    replaced parameter shares elements with another. Hidden units (`Unit.hidden`), whose parameters read NaN for a time,
    are passed over, and so are placeholders.
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
    """Return a sentence about each gathered parameter of ``units`` whose new memory the engine cannot take values from,
    as it has another shape or is another parameter's too; of the latter only the first. Empty if there are none."""
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
    """Give replaced parameters of ``units`` a copy of their values where these lie in the flat buffers of ``units``,
    which are about to be written."""
    flats = {storage_address(unit.flat) for unit in units}
    for unit in units:
        for number, parameter in enumerate(unit.parameters):
            given = parameter.detach()
            if _is_replaced(unit, number) and _lies_in(given, flats):
                parameter.data = given.clone()


@without_torch_function
def copy_pending(units: Sequence[Unit]) -> None:
    """Replace pending values of ``units`` (`UnitEdits.pending`) that lie in the memory of weights of ``units``, which
    is about to be written, by copies."""
    flats = {storage_address(unit.flat) for unit in units}
    for unit in units:
        for number, values in unit.edits.pending.items():
            if values is not None and _lies_in(values, flats):
                unit.edits.pending[number] = values.clone()


def _is_replaced(unit: Unit, number: int) -> bool:
    """Return whether user code has given parameter ``number`` of ``unit`` other memory than its placeholder or view."""
    kept = unit.placeholders[0].views if unit.state is UnitState.RELEASED else unit.views
    return not unit.parameters[number].is_set_to(kept[number])


def _lies_in(tensor: torch.Tensor, storages: set[int]) -> bool:
    """Return whether a tensor has strided memory in one of ``storages`` (addresses)."""
    return is_plain(tensor) and tensor.layout == torch.strided and storage_address(tensor) in storages
