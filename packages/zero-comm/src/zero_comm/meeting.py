"""A barrier with data, through the store, for ranks whose process groups are gone; it ends within an agreed time."""

from __future__ import annotations

import json
import time
from typing import Any

from torch._C._distributed_c10d import Store

from .errors import PeerError

_VERDICT = "verdict"
_ALL = "all ranks are here"
_LONGEST_PAUSE = 0.2  # seconds between two looks at the store


def meet(store: Store, rank: int, world_size: int, call: str, payload: Any, patience: float) -> list[Any]:
    """Return every rank's ``payload`` (JSON data) in rank order, once all ``world_size`` ranks have called this with
    ``store``.

    Use each ``store`` (or prefix of one) for one meeting. The first rank that has waited ``patience`` seconds ends the
    meeting for good: every rank, also one that comes later, then raises `PeerError`, which names the missing ranks.
    `PeerError` is also raised when the process that keeps the store is gone. ``call`` names the user's call in errors.
    """
    try:
        store.set(f"rank {rank}", json.dumps([call, payload]))
        if store.add(f"arrived {rank}", 1) == 1 and store.add("here", 1) == world_size:
            store.compare_set(_VERDICT, "", _ALL)
        _await_verdict(store, world_size, call, patience)
        verdict = store.get(_VERDICT).decode()
        if verdict != _ALL:
            raise PeerError(verdict)
        return [json.loads(store.get(f"rank {other}"))[1] for other in range(world_size)]
    except RuntimeError as error:
        if isinstance(error, PeerError):
            raise
        raise PeerError(f"{call}: the process that keeps the ranks' store is gone: {error}") from error


def _await_verdict(store: Store, world_size: int, call: str, patience: float) -> None:
    """Wait until ``store`` says how the meeting has ended: that all ranks are there, or who is missing. After
    ``patience`` seconds store the latter, unless another rank has stored an end by then. ``call`` names the user's
    call."""
    began, pause = time.monotonic(), 0.001
    while not store.check([_VERDICT]):
        if time.monotonic() - began >= patience:
            absent = [str(other) for other in range(world_size) if not store.check([f"rank {other}"])]
            who = f"rank{'s' * (len(absent) > 1)} {', '.join(absent)}"
            store.compare_set(
                _VERDICT,
                "",
                f"{call}: waited {patience:.0f} s in vain for {who} to make the same call after the failure",
            )
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
