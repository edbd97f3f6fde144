"""The place in the user's code that this process's main thread is at."""

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
    """A place in running code. ``text``: the torch.distributed call, if one runs, and the user's line. ``waits``: that
    call does little but wait for other ranks."""

    text: str
    waits: bool

    def __str__(self) -> str:
        return self.text


def failed_backward() -> BaseException | None:
    """Return the exception that the main thread is handling, if a backward pass of torch raised it, else None.

    May be called by any thread.
    """
    handled = sys._current_exceptions().get(threading.main_thread().ident or 0)
    failure = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
    traceback = None if failure is None else failure.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename != _AUTOGRAD:
        traceback = traceback.tb_next
    return None if traceback is None else failure


def place_of_main_thread() -> CodePlace:
    """Return the place where the main thread is now. May be called by any thread."""
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
    return CodePlace(f"is in {call}{where}" if call else f"runs{where}", waits)
