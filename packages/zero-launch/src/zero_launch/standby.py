"""A process that has torch imported, and forks ranks when the agent orders it.

[Note: standbys] Importing torch and the engine is most of the time in which ranks start. The agent of an elastic job
keeps a process that has done so already, and that forks the ranks of its host whenever all begin again. For the script
that is the same as a fresh start: the variables that it changes before it imports what is imported ahead are recorded
when it first runs, and hold when a standby imports the same. What a rank gets when it begins is the environment, the
files for its output and nothing else. Nothing that runs is inherited: a standby that has threads of Python's, or that
has opened a device, starts no ranks.

Imported ahead are torch, the part of it that the first optimizer imports, and the modules that a package names in its
`__import_ahead__`, as far as the script imports them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.abc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from zero_launch.processes import exit_status

IMPORTS_VARIABLE = "ZERO_LAUNCH_IMPORTS"
OPTION = "--standby"
Changes = dict[str, str | None]
"""Variables and their values, None for those that are gone."""
Imports = Sequence[tuple[str, Changes]]
"""Modules in the order of their import, and how the environment then differs from that of the rank's start."""

_TORCH = ("torch", "torch._dynamo")
_DECLARATION = "__import_ahead__"
_NAME = b"zero-standby"
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_GET_NAME = 1, 15, 16
_NAME_BYTES = 16
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
_HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send to every process of a job: a standby ends when the agent says so."""


class _Recorder(importlib.abc.MetaPathFinder):
    """Records into the file ``path`` which of the modules that a standby may import ahead a rank imports, and how the
    environment then differs from ``before``, the environment at the rank's start."""

    def __init__(self, path: Path, before: Mapping[str, str]) -> None:
        self._path, self._before = path, before
        self._found: dict[str, Changes] = {}

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Record the import of the module ``fullname`` if a standby may import it ahead; return None, so that the
        import proceeds as usual."""
        if fullname not in self._found and _can_be_ahead(fullname):
            self._found[fullname] = _environment_changes(self._before, os.environ)
            part = self._path.with_name(f"{self._path.name}.part")
            part.write_text(json.dumps(list(self._found.items())), encoding="utf-8")
            os.replace(part, self._path)


def _can_be_ahead(name: str) -> bool:
    """Return whether a standby may import the module ``name``: it is of torch's (`_TORCH`), or its package, which is
    imported already, lists it in `__import_ahead__`."""
    package = sys.modules.get(name.partition(".")[0])
    return name in _TORCH or (package is not None and name in vars(package).get(_DECLARATION, ()))


def _environment_changes(before: Mapping[str, str], after: Mapping[str, str]) -> Changes:
    """Return the variables of ``after`` that differ from ``before``, with None for those that are gone."""
    names = before.keys() | after.keys()
    return {name: after.get(name) for name in sorted(names) if before.get(name) != after.get(name)}


def record_imports() -> None:
    """Have this rank's imports recorded in the file that ZERO_LAUNCH_IMPORTS names, for the standbys of later attempts;
    without it do nothing."""
    path = os.environ.get(IMPORTS_VARIABLE)
    if path:
        sys.meta_path.insert(0, _Recorder(Path(path), dict(os.environ)))


def recorded(path: Path) -> str:
    """Return the imports of a rank that are recorded in the file ``path``, as JSON of `Imports`; empty if the file is
    missing, as the rank has not imported any module that can be imported ahead.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def stand_by(descriptor: int) -> None:
    """Run as a standby: import the modules that the agent names over the socket ``descriptor``, then fork a rank for
    each order of the agent. Return only in each rank.

    The first line from the agent is JSON of `Imports`; each further one an order: the rank's `env`, and the files
    `stdout` and `stderr` or null. Ends this process when the agent closes the socket. Answers are lines of JSON: first
    `why_not`, a reason for which no rank can be forked, or null; then `pid` of each rank, and `pid` and `status` when
    it has ended, which leaves a zombie until the next order.
    """
    handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _HELD}
    name, own = _set_name(_NAME), _silence()
    with socket.socket(fileno=descriptor) as line:
        reader = line.makefile("rb")
        _import_ahead(json.loads(reader.readline() or b"[]"))
        _send_answer(line, why_not=_reason_not_to_fork())
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, _wake_select)
        signal.set_wakeup_fd(woken)
        start = _start_ranks(line, reader, wake)
        signal.set_wakeup_fd(-1)
        reader.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in (wake, woken):
        os.close(descriptor)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    _become_rank(start, name, own)


def _import_ahead(imports: Imports) -> None:
    """Import each module under the environment in which the rank imported it. An import that fails is skipped: the
    script's own will fail too, where somebody reads it."""
    before = dict(os.environ)
    for name, changes in imports:
        _set_environment({**before, **changes})
        with contextlib.suppress(Exception):  # the script meets it again, with somebody to read it
            importlib.import_module(name)


def _reason_not_to_fork() -> str | None:
    """Return why this process must not be forked (threads, open devices); None if it may."""
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"importing ahead began threads ({names})"
    opened = [link for link in _open_files() if link.startswith(_DEVICES)]
    return f"importing ahead opened {opened[0]}" if opened else None


def _open_files() -> list[str]:
    """Return the targets of this process's open file descriptors: paths, or words such as `socket:[123]`."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return links


def _start_ranks(line: socket.socket, reader: Any, wake: int) -> dict[str, Any]:
    """Fork a rank for every order that ``reader`` has; return the order in each rank, as `stand_by` describes it.

    In the standby itself it does not return: the process exits when the agent has closed the socket. ``line``: the
    socket, for answers. ``wake``: a descriptor that becomes readable when a rank ends.
    """
    running: set[int] = set()
    ended: set[int] = set()
    parent = os.getpid()
    while True:
        ready = select.select([line.fileno(), wake], [], [])[0]
        if wake in ready:
            os.read(wake, 4096)
        for pid in sorted(running):
            status = exit_status(pid)
            if status is not None:
                running.discard(pid)
                ended.add(pid)
                _send_answer(line, pid=pid, status=status)
        if line.fileno() not in ready:
            continue
        order = reader.readline()
        if not order.endswith(b"\n"):
            sys.exit(0)
        while ended:
            os.waitpid(ended.pop(), 0)
        pid = os.fork()
        if not pid:
            _die_with(parent)
            start: dict[str, Any] = json.loads(order)
            return start
        running.add(pid)
        _send_answer(line, pid=pid)


def _die_with(parent: int) -> None:
    """Have the kernel send this process SIGKILL when ``parent`` ends; exit at once if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"the standby (pid {parent}) was gone before this rank began")


def _become_rank(start: dict[str, Any], name: bytes, own: dict[int, int]) -> None:
    """Turn this process, just forked, into the rank that ``start`` describes, with a session, environment and output of
    its own.

    ``start``: the agent's order (see `stand_by`). ``name``: what the process is to be called in `ps`. ``own``: what
    `_silence` returned; these descriptors are closed.
    """
    os.setsid()
    _set_name(name)
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()  # as in a process of its own; Python's own generator does that itself
    _set_environment(start["env"])
    for number, path in ((1, start["stdout"]), (2, start["stderr"])):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, number)
            os.close(file)
        else:
            os.dup2(own[number], number)
        os.close(own[number])


def _set_environment(variables: Mapping[str, str | None]) -> None:
    """Replace this process's environment by ``variables``, without those that are None."""
    wanted = {name: value for name, value in variables.items() if value is not None}
    if wanted != dict(os.environ):
        os.environ.clear()
        os.environ.update(wanted)


def _send_answer(line: socket.socket, **answer: object) -> None:
    """Send the agent the fields of ``answer`` as a line of JSON over the socket ``line``; do nothing if the agent is
    gone."""
    with contextlib.suppress(OSError):  # the agent is gone, and so is this process soon
        line.sendall(json.dumps(answer).encode() + b"\n")


def _wake_select(signum: int, frame: FrameType | None) -> None:
    """Do nothing. It handles SIGCHLD, whose only effect is to wake the select of `_start_ranks`."""


def _silence() -> dict[int, int]:
    """Redirect standard output and error to /dev/null; return copies of the old descriptors, by number (1 and 2)."""
    own = {number: os.dup(number) for number in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in own:
        os.dup2(nowhere, number)
    os.close(nowhere)
    return own


def _set_name(name: bytes) -> bytes:
    """Set this process's name, as `ps` shows it, and return the old one."""
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(_NAME_BYTES)
    libc.prctl(_PR_GET_NAME, before)
    libc.prctl(_PR_SET_NAME, name)
    return before.value
