"""The targets of fuzzing by name; `nox -s fuzz` runs them with Atheris, test_fuzz.py a few cases of each without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from unittest import mock

from fuzz_files import Configurations, Extents, Headers, Hostfiles, Manifests
from fuzz_launcher import Messages
from fuzz_mutations import Form

import zero_launch.roster
from zero_launch.facts import versions


class Target(Protocol):
    """Something that is read from outside. `check` returns whether these bytes were read or raises for a defect."""

    form: Form

    def seeds(self) -> list[bytes]: ...

    def check(self, data: bytes) -> bool: ...


TARGETS: dict[str, Callable[[Path], Target]] = {
    "manifest": Manifests,
    "header": Headers,
    "extents": Extents,
    "configuration": Configurations,
    "hostfile": Hostfiles,
    "messages": Messages,
}
MOST_MEMORY = dict.fromkeys(TARGETS, 512 << 20)
"""Bytes of a process that fuzzes the target."""


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Have the launcher look up what is installed once, which takes longer than all else."""
    here = versions()
    with mock.patch.object(zero_launch.roster, "versions", lambda: dict(here)):
        yield
