"""The place of this process's main thread, in the user's words."""

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
_SMALL = ("barrier", "monitored_barrier", "all_gather_object", "gather_object", "broadcast_object_list", "new_group")


@dataclass(frozen=True)
class CodePlace:
    """``text``: what runs, and from which line of the user's. ``waits``: it can only be waiting for other ranks."""

    text: str
    waits: bool

    def __str__(self) -> str:
        return self.text


def failed_backward() -> BaseException | None:
    """Return what a backward pass of torch raised, while the main thread is in the code that handles it, else None.
    May be called by any thread."""
    handled = sys._current_exceptions().get(threading.main_thread().ident or 0)
    failure = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
    traceback = None if failure is None else failure.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename != _AUTOGRAD:
        traceback = traceback.tb_next
    return None if traceback is None else failure


def place_of_main_thread() -> CodePlace:
    """Where the main thread is now; may be called by any thread."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    call, waits, line = "", False, ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_DISTRIBUTED):
            name = frame.f_code.co_name
            if name != "wrapper":
                call, waits = f"torch.distributed.{name}", name in _SMALL
        elif not is_library(path):
            line = f"{os.path.basename(path)}:{frame.f_lineno}"
            break
        frame = frame.f_back
    where = f" at {line}" if line else ""
    return CodePlace(f"is in {call}{where}" if call else f"runs{where}", waits)
