"""Walk over every key of the configuration, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero_settings._base import Section
from zero_settings._optim_keys import SCHEDULES
from zero_settings._optimizer_params import OPTIMIZERS
from zero_settings.keys import ConfigFile


def sections(section: type[Section] = ConfigFile, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path of keys, section class) for every section but the parameters of optimizers and schedules."""
    yield path, section
    for name in section.model_fields:
        child = section.section_of(name, {})
        if child is not None and name != "params":
            yield from sections(child, (*path, name))


def nested(path: tuple[str, ...], value: dict[str, Any]) -> dict[str, Any]:
    """Return {path[0]: {path[1]: ... value}}."""
    for name in reversed(path):
        value = {name: value}
    return value


PARAMS = [("optimizer", name, cls) for name, cls in OPTIMIZERS.items() if not name.startswith("mu")]
PARAMS += [("optimizer", "muon", OPTIMIZERS["muon"])]
PARAMS += [("scheduler", name, cls) for name, cls in SCHEDULES.items()]
