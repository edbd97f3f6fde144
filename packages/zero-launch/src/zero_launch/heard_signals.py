"""Signals to the launcher of a job on several hosts, put into its inbox among the hosts' messages."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from zero_launch.peers import Inbox
from zero_launch.requeue import hold, release

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class HeardSignals:
    """Turns signals into messages in ``inbox``, from `take` to `give_back`; only in the main thread.

    A message is `("", {"kind": "signal", "signal": number})`. ``requeue``: the job goes back into the scheduler's queue
    when asked to end (see [Note: requeue signals]); then SIGUSR1 is heard too.
    """

    def __init__(self, inbox: Inbox, *, requeue: bool) -> None:
        self._inbox = inbox
        self._requeue = requeue
        self._saved: dict[signal.Signals, Any] = {}

    def take(self) -> None:
        """Install the handlers, except for signals that this process ignores; with ``requeue``, no longer hold signals
        back. Do nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        heard = (*_SIGNALS, signal.SIGUSR1) if self._requeue else _SIGNALS
        self._saved = {s: signal.getsignal(s) for s in heard if signal.getsignal(s) is not signal.SIG_IGN}
        for signum in self._saved:
            signal.signal(signum, self._hear)
        if self._requeue:
            release()

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        """Put the signal into the inbox. It is the signal handler; ``frame`` is not read."""
        self._inbox.put(("", {"kind": "signal", "signal": signum}))

    def give_back(self, *, held: bool) -> None:
        """Restore the handlers of before `take`, if it installed any. ``held``: from here on
        hold back the signals of `requeue.SIGNALS`."""
        if held and self._saved:
            hold()
        for signum, handler in self._saved.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        self._saved = {}
