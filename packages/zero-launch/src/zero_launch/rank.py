"""The program of each rank: `python -m zero_launch.rank (script|module|program|call) TARGET ARGS...`.

The target runs as `__main__`, as if Python had been started with it. Around it this file does four things: the process
dies with its launcher, lines reach the log when they are complete, an exception that nobody caught is written to the
engine's error file, and the end of the script to a file beside it, so that the launcher can say which rank failed first
and why, and process groups end before the interpreter does; see [Note: gloo's threads at the end] in ending.py. With
`--standby N` before the kind it waits for its start first; see [Note: standbys] in standby.py.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from types import TracebackType

from zero_launch.ending import end_process_groups
from zero_launch.processes import CORES_VARIABLE, END_FILE, LAUNCHER_PID_VARIABLE, REQUEUE_VARIABLE
from zero_launch.requeue import SIGNALS
from zero_launch.standby import OPTION, record_imports, stand_by
from zero_launch.torch_import import keep_from_collector

_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the target that `sys.argv` names, as this module's docstring says; return when it has returned.

    Raises SystemExit with the script's status, or with 1 after an uncaught exception, which is printed and written to
    the error file. A program replaces this process.
    """
    _die_with_launcher()
    cores = os.environ.get(CORES_VARIABLE)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    _, *words = sys.argv
    descriptor = int(words[1]) if words[0] == OPTION else None
    kind, target, *args = words if descriptor is None else words[2:]
    sys.argv = [target, *args]
    if kind == "program":
        os.execvp(target, sys.argv)  # it keeps the cores, and dies with the launcher too
    if kind == "script" and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(target))
    if os.environ.get(REQUEUE_VARIABLE):
        for signum in SIGNALS:  # Slurm may send them to every process; see [Note: requeue signals]
            signal.signal(signum, signal.SIG_IGN)
    keep_from_collector()
    if descriptor is None:
        record_imports()
    else:
        stand_by(descriptor)
    faulthandler.enable()
    rank = os.getpid()
    atexit.register(_end_rank, rank)  # before the script's, so that it runs after them
    if not sys.stdout.isatty():
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        if kind == "script":
            runpy.run_path(target, run_name="__main__")
        elif kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            from zero_launch.notebook import run_call

            run_call(target)
    except SystemExit as exit:
        if os.getpid() == rank:
            write_end_file(exit.code, time.time())
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if os.getpid() != rank:  # the script forked, and what became of the child is not the rank's end
            raise
        error.__traceback__ = _own_part(error.__traceback__)
        when = time.time()
        # As the interpreter does it: what runs at the end then knows that an exception ended the script.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        write_error_file(error, when)
        sys.exit(1)
    else:
        if os.getpid() == rank:
            write_end_file(None, time.time())


def _end_rank(rank: int) -> None:
    """End the process groups of the process with pid ``rank``; do nothing in one that its script forked."""
    if os.getpid() == rank:
        end_process_groups()


def write_error_file(error: BaseException, when: float) -> None:
    """Write an uncaught exception to the error file of torch's agent, in its format, with our time stamp; do nothing if
    TORCHELASTIC_ERROR_FILE does not name that file.

    ``when``: seconds since the epoch. The file is `{"message": {"message": ..., "extraInfo": {"py_callstack",
    "timestamp", "uncaught_at"}}}`.
    """
    path = os.environ.get(_ERROR_FILE_VARIABLE)
    if not path:
        return
    record = {
        "message": {
            "message": "".join(traceback.format_exception_only(error)).strip(),
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(when)),
                "uncaught_at": when,
            },
        }
    }
    _write_json(path, record)


def write_end_file(code: object, when: float) -> None:
    """Write next to the error file that the script has ended: its exit status by ``code``, the argument of `sys.exit`
    (None: it returned), and ``when`` (seconds since the epoch). Do nothing without an error file.

    The interpreter takes up to a second more to end, in which a rank that waits for this one may fail first.
    """
    path = os.environ.get(_ERROR_FILE_VARIABLE)
    if path:
        status = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        _write_json(os.path.join(os.path.dirname(path), END_FILE), {"status": status, "at": when})


def _write_json(path: str, record: object) -> None:
    """Write ``record`` as JSON to a file that appears whole or not at all: the launcher may look at any moment."""
    scratch = f"{path}.part"
    with open(scratch, "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(scratch, path)


def _die_with_launcher() -> None:
    """Have the kernel send this process SIGKILL when the launcher ends; exit at once, with a message, if the launcher
    has ended already.

    The launcher is the process that ZERO_LAUNCH_PID names; without that variable do nothing.
    """
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):
        sys.exit(f"zero-launch (pid {launcher}) was gone before this rank began")


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` without the frames of this package and of runpy at its start, so that it begins in the user's
    script; the whole of it if it has no other frames."""
    rest = trace
    while rest is not None and _is_ours(rest.tb_frame.f_code.co_filename):
        rest = rest.tb_next
    return rest if rest is not None else trace


def _is_ours(filename: str) -> bool:
    """Return whether the code in the file ``filename`` is this package's or runpy's."""
    return os.path.dirname(filename) == os.path.dirname(__file__) or filename in (runpy.__file__, "<frozen runpy>")


if __name__ == "__main__":
    main()
