"""The hooks on ``state_dict`` and ``load_state_dict`` of modules that use units.

They keep released parameters, which have no values, from being saved or loaded as if they had some. A releasable unit
is one that may be released, where parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .errors import ReleasedParameterError
from .hints import Hints
from .live import UnitState
from .scripted import reports_calls
from .unit import Unit


def replace_released_entries(units: list[Unit], hints: Hints) -> Callable[[nn.Module, dict[str, Any], str, Any], None]:
    """Return a state-dict hook that replaces the parameters of ``units`` that are released by meta tensors, so that a
    plain save of the state dict cannot be loaded by mistake. ``hints``: warn at the first."""
    places = {id(p): unit for unit in units if unit.releasable for p in unit.parameters}

    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """Replace the entries of released parameters in ``state_dict``, whose keys for ``module`` begin with
        ``prefix``, by meta tensors."""
        for key, parameter in _reported_parameters(module):
            unit = places.get(id(parameter))
            released = unit is not None and unit.state is UnitState.RELEASED
            if released and parameter is not None and prefix + key in state_dict:
                state_dict[prefix + key] = torch.empty_like(parameter, device="meta")
                hints.hollow(prefix + key)

    return hook


def refuse_released_entries(units: list[Unit]) -> Callable[..., None]:
    """Return a load-state-dict hook that raises `ReleasedParameterError` if the state dict has an entry for a parameter
    of ``units`` that is released, which it names: there is no memory to load into."""
    places = {id(p): (unit, n) for unit in units if unit.releasable for n, p in enumerate(unit.parameters)}

    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_more: Any) -> None:
        """Raise `ReleasedParameterError` if ``state_dict`` has an entry for a released parameter of ``module``, whose
        keys begin with ``prefix``."""
        for key, parameter in module._parameters.items():
            unit, number = places.get(id(parameter), (None, 0))
            if unit is not None and unit.state is UnitState.RELEASED and prefix + key in state_dict:
                raise ReleasedParameterError(
                    f"load_state_dict: parameter '{unit.names[number]}' is released. Load inside "
                    "`engine.gathered(list(model.parameters()), modifier_rank=0)`, and take the state dict inside "
                    "`engine.gathered(...)` too."
                )

    return hook


def write_back_loaded(units: list[Unit]) -> None:
    """Copy the values that ``load_state_dict`` has written into parameters of ``units`` into their shards and masters;
    only for units that are never released."""
    for unit in units:
        if not unit.releasable:
            unit.write_back()


def _reported_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter | None]]:
    """Yield (key, parameter) for the parameters of ``module`` itself, and of modules in it that report no calls by
    hooks: scripted ones, lists and dicts. ``prefix``: put before each key. The parameter is None where None is
    registered."""
    for key, parameter in module._parameters.items():
        yield prefix + key, parameter
    for key, child in module.named_children():
        if not reports_calls(child):
            yield from _reported_parameters(child, f"{prefix}{key}.")
