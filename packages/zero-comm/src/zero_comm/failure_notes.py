"""Notes in the store by which a rank tells the others why it failed or left.

[Note: the first cause] A message to a rank that is not listening is lost when the sender's process ends, so the reason
goes into the store of the process group. The first reason there is never replaced: a rank that fails because another
failed finds it, whichever connection showed it that something is wrong.
"""

from __future__ import annotations

import json
from contextlib import suppress

from torch._C._distributed_c10d import Store

from .errors import CommError, PeerError


class FailureNotes:
    """The failure that a rank of one process group reported first, and one note per rank, in the group's store: why a
    rank failed, left, or may make no further call.

    ``store``: torch's key-value store, which works also when process groups are broken. ``name``: of the group; it
    begins every key, so no other group may have the same. ``rank``, ``world_size``: of this rank in the group. If the
    store is gone, with the rank that kept it, nothing is stored, deleted or found, and nothing raises.
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int) -> None:
        self.name = name
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._own_reason: str | None = None
        self._has_note = False

    def report_failure(self, reason: str) -> None:
        """Store that this rank failed for ``reason``, unless a rank has reported a failure before."""
        with suppress(RuntimeError):
            self._store.compare_set(self.name, "", json.dumps([self._rank, f"failed: {reason}"]))

    def give_up(self, reason: str) -> None:
        """Store ``reason`` as why this rank left the others, unless a rank has reported a failure before. Where it was
        stored, `explain` names it in this rank's own errors, too."""
        self._own_reason = reason
        with suppress(RuntimeError):
            self._store.compare_set(self.name, "", json.dumps([self._rank, reason]))

    def leave(self, reason: str) -> None:
        """Store ``reason`` as this rank's note: why it may make no further call. It replaces an earlier one."""
        with suppress(RuntimeError):
            self._store.set(self._note_key(self._rank), json.dumps([self._rank, reason]))
            self._has_note = True

    def withdraw(self) -> None:
        """Delete this rank's note, if it has left one."""
        if self._has_note:
            with suppress(RuntimeError):
                self._has_note = not self._store.delete_key(self._note_key(self._rank))

    def explain(self, error: CommError) -> CommError:
        """Return a `PeerError` with the cause of ``error``: the failure that was reported first or, if there is none,
        the note of the lowest other rank that has left one. If the first is this rank's own, a `PeerError` that says
        why it gave up.

        Return ``error`` itself if there is neither, when the store is gone, and when this rank reported the failure.
        """
        notes = (self._note_key(rank) for rank in range(self._world_size) if rank != self._rank)
        try:
            key = next((k for k in (self.name, *notes) if self._store.check([k])), None)
            if key is None:
                return error
            rank, reason = json.loads(self._store.get(key))
        except RuntimeError:
            return error
        if rank == self._rank:
            return error if self._own_reason is None else PeerError(f"this rank {self._own_reason}")
        return PeerError(f"rank {rank} {reason}; here: {error}")

    def _note_key(self, rank: int) -> str:
        """Return the store's key for the note of ``rank``."""
        return f"{self.name} note {rank}"
