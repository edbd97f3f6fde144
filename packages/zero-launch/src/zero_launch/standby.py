"""A rank before its start: it has imported torch, and waits to be told what it is.

[Note: standbys] Importing torch is most of the time in which ranks start. The agent of an elastic job keeps a process
per rank that has done so already; when all ranks begin again, each of these becomes one. For the script that is the
same as a fresh start: the variables that it changes before it imports torch are recorded when it first runs, and hold
when a standby imports torch. What a standby gets when it begins is the environment, the files for its output and
nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.abc
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IMPORTS_VARIABLE = "ZERO_LAUNCH_IMPORTS"
OPTION = "--standby"
_IMPORTED_AHEAD = "torch"
_NAME = b"zero-standby"
_PR_SET_NAME, _PR_GET_NAME = 15, 16
_NAME_BYTES = 16


class _Recorder(importlib.abc.MetaPathFinder):
    """Writes down, when torch is first imported, how the script has changed the environment."""

    def __init__(self, path: Path, before: Mapping[str, str]) -> None:
        self._path, self._before = path, before

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Find nothing: the import goes on as it would have."""
        if fullname == _IMPORTED_AHEAD and self in sys.meta_path:
            sys.meta_path.remove(self)
            part = self._path.with_name(f"{self._path.name}.part")
            part.write_text(json.dumps(_changes(self._before, os.environ)), encoding="utf-8")
            os.replace(part, self._path)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that differ, None for those that are gone."""
    names = before.keys() | after.keys()
    return {name: after.get(name) for name in sorted(names) if before.get(name) != after.get(name)}


def record_imports() -> None:
    """Have the import of torch recorded where the environment says, for the standby that follows this rank."""
    path = os.environ.get(IMPORTS_VARIABLE)
    if path:
        sys.meta_path.insert(0, _Recorder(Path(path), dict(os.environ)))


def recorded(path: Path, env: Mapping[str, str]) -> dict[str, str] | None:
    """Return ``env`` as the script changes it before it imports torch; None when it has not imported it (yet)."""
    try:
        changes: dict[str, str | None] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    changed = {**env, **changes}
    return {name: value for name, value in changed.items() if value is not None}


def stand_by(descriptor: int) -> None:
    """Import torch, say so on the socket ``descriptor``, and return as a rank when the agent says which.

    Ends this process when the agent closes the socket instead.
    """
    name, order = _set_name(_NAME), b""
    with socket.socket(fileno=descriptor) as line:
        own = _silence()
        with contextlib.suppress(Exception):  # the script meets it again, with somebody to read it
            importlib.import_module(_IMPORTED_AHEAD)
        with contextlib.suppress(OSError):  # the agent may have given its order already, and gone
            line.sendall(b"\n")
        with contextlib.suppress(OSError), line.makefile("rb") as reader:
            order = reader.readline()
    if not order.endswith(b"\n"):
        sys.exit(0)
    start: dict[str, Any] = json.loads(order)
    _set_name(name)
    os.environ.clear()
    os.environ.update(start["env"])
    for number, path in ((1, start["stdout"]), (2, start["stderr"])):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, number)
            os.close(file)
        else:
            os.dup2(own[number], number)
        os.close(own[number])


def _silence() -> dict[int, int]:
    """Let nothing be written until this is a rank; return what standard output and error are."""
    own = {number: os.dup(number) for number in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in own:
        os.dup2(nowhere, number)
    os.close(nowhere)
    return own


def _set_name(name: bytes) -> bytes:
    """Give this process a name, as `ps` shows it; return the one that it had."""
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(_NAME_BYTES)
    libc.prctl(_PR_GET_NAME, before)
    libc.prctl(_PR_SET_NAME, name)
    return before.value
