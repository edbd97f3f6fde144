"""The places in the user's code that the main thread is at, and that failures come from.

The user's code is every file that is no library (`is_library`): neither torch, the zero packages nor the interpreter's
frozen modules. A place in it is written `train.py:31`.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from types import FrameType

import torch.autograd.graph
import torch.distributed as dist

from .flight_recorder import is_library

_DISTRIBUTED = os.path.dirname(dist.__file__)
_AUTOGRAD = torch.autograd.graph.__file__
_CAUSES = 16  # looked through of one exception; user code may make a circle of them
_WAITING_CALLS = (
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "new_group",
)


@dataclass(frozen=True)
class CodePlace:
    """A place in running code.

    ``text``: the torch.distributed call, if one runs, and the user's line. ``waits``: that call does little but wait
    for other ranks. ``in_call``: such a call runs.
    """

    text: str
    waits: bool
    in_call: bool

    def __str__(self) -> str:
        """Return ``text``."""
        return self.text


def describe_failure(failure: BaseException, when: str = "") -> str:
    """Return words for an error or a log: type and text of ``failure``, then in brackets ``when`` (as "in step 3";
    empty for nothing) and the last line of the user's code on the way to where it was raised: "ValueError: bad (in step
    3, at train.py:31)"."""
    line = _users_line(failure)
    where = ", ".join(part for part in (when, f"at {line}" if line else "") if part)
    return f"{type(failure).__name__}: {failure}" + (f" ({where})" if where else "")


def _users_line(failure: BaseException) -> str:
    """Return `train.py:31` for the last line of the user's code on the way to where ``failure`` was raised; empty if it
    was never raised or no such line is known."""
    found, traceback = "", failure.__traceback__
    frame = None if traceback is None else traceback.tb_frame
    while traceback is not None:
        if not is_library(path := traceback.tb_frame.f_code.co_filename):
            found = f"{os.path.basename(path)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    while frame is not None and not found:  # it has not come to the user's code yet, which has called what raised it
        if not is_library(path := frame.f_code.co_filename):
            found = f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return found


def failed_backward() -> tuple[BaseException, BaseException] | None:
    """Return (failure, cause): the exception that the main thread is handling or has ended by, and the earliest
    exception in the chain of its causes, itself included, that a backward pass of torch raised. None if there is no
    such exception or cause. May be called by any thread."""
    handled = sys._current_exceptions().get(threading.main_thread().ident or 0)
    failure = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
    if failure is None:
        failure = _main_thread_failure()
    found, cause = None, failure
    for _ in range(_CAUSES):
        if cause is None:
            break
        if _passed_autograd(cause):
            found = cause
        cause = cause.__cause__ or cause.__context__
    return None if failure is None or found is None else (failure, found)


def excused_exceptions() -> frozenset[int]:
    """Return the `id` of the exceptions that this thread is handling, and that the main thread has ended by, now; that
    of None where there is none. Called when a call of the engine begins: for these exceptions the watch (watch.py),
    which ends waits that would never end, does not give up."""
    return frozenset((id(sys.exc_info()[1]), id(_main_thread_failure())))


def _main_thread_failure() -> BaseException | None:
    """Return the exception by which the main thread has ended; None while it runs, or if it has ended without one."""
    found: BaseException | None = vars(sys).get("last_value")  # getattr would make and drop an exception in each pass
    return found


def _passed_autograd(failure: BaseException) -> bool:
    """Return whether ``failure`` was raised inside a backward pass: it came through torch's call of autograd."""
    traceback = failure.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename != _AUTOGRAD:
        traceback = traceback.tb_next
    return traceback is not None


def place_of_main_thread() -> CodePlace:
    """Return the place where the main thread is now: the innermost line of the user's code, and the call of
    torch.distributed that it runs, if any. May be called by any thread."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    call, waits, line = "", False, ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_DISTRIBUTED):
            name = frame.f_code.co_name
            if name != "wrapper":
                call, waits = f"torch.distributed.{name}", name in _WAITING_CALLS
        elif not is_library(path):
            line = f"{os.path.basename(path)}:{frame.f_lineno}"
            break
        frame = frame.f_back
    where = f" at {line}" if line else ""
    return CodePlace(f"is in {call}{where}" if call else f"runs{where}", waits, bool(call))
