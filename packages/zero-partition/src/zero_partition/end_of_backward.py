"""Detect the end of a backward pass that the user has started with ``loss.backward()``.

[Note: the exception of a failed run] A run of autograd that raises drops its callbacks while the exception is still in
C++, where Python cannot see it. The exception reaches Python in the frame of torch that has called autograd. A trace
function of that frame sees it there, before the user's code does. It is set when the callback is dropped and removed at
its first event, so a run that succeeds pays nothing, and debuggers miss nothing but that one event.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.autograd.graph

Failed = Callable[[BaseException | None], None]


class EndOfBackward:
    """A callback for autograd that calls ``end`` when its run is over, or ``failed`` when the run or ``end`` raises.

    ``failed`` gets the exception, before the user's code does; it gets None if another thread than this one called
    autograd. A callback that autograd drops belongs to a run that has raised; see [Note: the exception of a failed
    run].
    """

    def __init__(self, end: Callable[[], None], failed: Failed) -> None:
        self._end = end
        self._failed = failed
        self._is_over = False

    def __call__(self) -> None:
        """Call ``end``; autograd calls this when its run is over. If ``end`` raises, call ``failed`` with the exception
        and raise it."""
        self._is_over = True
        try:
            self._end()
        except BaseException as failure:
            self._failed(failure)
            raise

    def __del__(self) -> None:
        """Have ``failed`` called if autograd has dropped this callback before its run was over: with the exception once
        that reaches Python, or at once with None if this thread has not called autograd."""
        if self._is_over:
            return
        frame = _caller_of_autograd()
        if frame is None:
            self._failed(None)
        else:
            _call_with_next_exception(frame, self._failed)


def _caller_of_autograd() -> FrameType | None:
    """Return the innermost running frame of this thread in which torch calls autograd; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.autograd.graph.__file__:
        frame = frame.f_back
    return frame


def _call_with_next_exception(frame: FrameType, failed: Failed) -> None:
    """Have ``failed`` called with the exception that is about to arrive in ``frame``, before ``frame`` handles it; with
    None if the next event of ``frame`` is no exception.

    Sets a trace function (`sys.settrace`) until that event.
    """
    before, own = sys.gettrace(), frame.f_trace

    def on_event(where: FrameType, event: str, details: Any) -> Any:
        """Restore the trace functions of before, pass the exception of ``event`` to ``failed`` (None if it is another
        event), and return what the frame's own trace function returns. ``where``: the frame; ``details``: as for any
        trace function."""
        sys.settrace(before)
        where.f_trace = own
        failed(details[1].with_traceback(details[2]) if event == "exception" else None)
        return own(where, event, details) if own is not None else None

    frame.f_trace = on_event
    sys.settrace(lambda *_: None)  # calls of other functions are not traced
