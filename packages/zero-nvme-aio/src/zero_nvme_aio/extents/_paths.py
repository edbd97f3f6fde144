"""The paths of a store: which of them gets the next bytes, and what happens to one that is full, fails or slows down.

A stripe is the number of a path, from 0. A unit is one of the equally long parts of a name that are striped over the
paths. Bytes go to the paths in proportion to their weights, which say how fast each is: the bytes per second that were
measured, or any numbers in the same proportion.
"""

from __future__ import annotations

import errno
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .._request import Request
from ..errors import free_bytes

__all__ = ["PathUse", "StorePaths"]

SLOW_SHARE = 0.5
"""A path is slow if, measured against its weight, it is slower than this share of the fastest."""
WINDOW_BYTES = 32 << 20
"""The bytes that every path has to move before they are compared."""
LOOK_FOR_ROOM_SECONDS = 1.0
"""How often a full path is looked at."""
TRY_AGAIN_SECONDS = 60.0
"""After which time a full path is tried again in any case: quotas have no room that can be looked at."""
_WORTH_A_SHIFT = 1.5  # by which factor a weight must be wrong to be replaced

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FAILED = frozenset(
    {
        *(errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EPERM),
        *(errno.EACCES, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENOMEDIUM),
    }
)


class PathUse(NamedTuple):
    """What a store has done with one path: its `folder` and `name`; the `share` of the bytes that it gets now, from 0
    to 1; its `state`, "in use", "full", "failed" or "slow"; the bytes written and read; and the bytes per second that
    the path moved while it had transfers, 0 if there were none.
    """

    folder: str
    name: str
    share: float
    state: str
    bytes_written: int
    bytes_read: int
    bytes_per_s: float


class _Path:
    """The state of one path. `given`: the weight that the store was made with; `weight`: the present one. `placed`: the
    bytes allocated on the path; `written`, `read`: the bytes moved so far. `full`, `failed`, `slow`: the path is that
    now. `short`: it was full, and bytes of its share are on other paths. `told`: the topics on which users were told
    about it. `silent_since_ns`: the begin of the last silence that users were told about.
    """

    def __init__(self, folder: str, name: str, weight: float) -> None:
        self.folder, self.name = folder, name
        self.given = self.weight = weight
        self.placed = self.written = self.read = 0
        self.full = self.failed = self.slow = self.short = False
        self.told: set[str] = set()
        self.silent_since_ns = 0
        self._full_at = self._looked_at = 0.0
        self._free_bytes = 0  # when it was full
        self._under_way: deque[tuple[Request, int]] = deque()
        self._ended_ns = 0
        self._busy_ns = self._moved = 0  # since the last comparison
        self._busy_before_ns = self._moved_before = 0

    def started(self, request: Request, nbytes: int) -> None:
        """Follow a transfer of `nbytes` until it ends."""
        self._under_way.append((request, nbytes))

    def note_full(self) -> None:
        """Mark the path as full; remember the time, and the bytes that the file system reports as free."""
        self.full = self.short = True
        self._full_at = self._looked_at = time.monotonic()
        self._free_bytes = free_bytes(self.folder) or 0

    def has_room(self, nbytes: int) -> bool:
        """Return whether a path that was full is to be tried again: `nbytes` more are free than when it became full, or
        that was over a minute ago. Asks the file system once a second at most; in between the answer is False.
        """
        now = time.monotonic()
        if now - self._looked_at < LOOK_FOR_ROOM_SECONDS:
            return False
        self._looked_at = now
        return now - self._full_at > TRY_AGAIN_SECONDS or (free_bytes(self.folder) or 0) >= self._free_bytes + nbytes

    def unanswered_since_ns(self) -> int:
        """Return the time, in nanoseconds of the monotonic clock, since which transfers have been under way and none
        has ended; 0 if none is under way. Needs no lock.
        """
        times = [request.times() for request, _ in tuple(self._under_way)]
        begins = [begin for begin, end in times if not end]
        return max([min(begins), self._ended_ns, *(end for _, end in times)]) if begins else 0

    def count_ended(self) -> int:
        """Count the transfers that ended since the last call; return the bytes moved since the last `take_rate`. The
        time in which several were under way counts once.
        """
        while self._under_way and self._under_way[0][0].done():
            request, nbytes = self._under_way.popleft()
            begin, end = request.times()
            self._busy_ns += max(0, end - max(begin, self._ended_ns))
            self._ended_ns = max(self._ended_ns, end)
            self._moved += nbytes if request.error() is None else 0
        return self._moved

    def take_rate(self) -> float:
        """Return the bytes per second since the last call of this, and begin to measure anew; 0 if no time was
        measured.
        """
        rate = self._moved * 1e9 / self._busy_ns if self._busy_ns else 0.0
        self._busy_before_ns += self._busy_ns
        self._moved_before += self._moved
        self._busy_ns = self._moved = 0
        return rate

    @property
    def bytes_per_s(self) -> float:
        """Return the average bytes per second while transfers were under way, since the start; 0 if there were none."""
        busy = self._busy_before_ns + self._busy_ns
        return (self._moved_before + self._moved) * 1e9 / busy if busy else 0.0


class StorePaths:
    """The paths of a store, `folders`, with their `weights` (None: all alike) and `names` for messages (None: the
    folders).

    Every unit of a name keeps its path, also in later generations, until that path fails, or until the weights change:
    transfers are timed, and a path that, compared with the fastest, reaches less than half of its weight gets fewer
    bytes until it is faster again. `tell` gets one sentence, when `say` is called, for each path that is full, fails or
    is slow; None: the sentence is a warning. The caller holds the store's lock, except where a method says otherwise.
    ValueError for weights or names that do not fit.
    """

    def __init__(
        self,
        folders: Sequence[str],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        weights = [1.0] * len(folders) if weights is None else weights
        names = [f"'{folder}'" for folder in folders] if names is None else names
        if len(weights) != len(folders) or not all(0 < weight < float("inf") for weight in weights):
            raise ValueError(f"expected a positive weight for each of {len(folders)} paths, got {list(weights)}")
        if len(names) != len(folders):
            raise ValueError(f"expected a name for each of {len(folders)} paths, got {len(names)}")
        self._paths = [_Path(*path) for path in zip(folders, names, weights, strict=True)]
        self._tell = tell or (lambda text: warnings.warn(text, stacklevel=4))
        self._unsaid: deque[str] = deque()
        self._stripes: dict[tuple[str, int], int] = {}
        self._shifting = False

    def __len__(self) -> int:
        return len(self._paths)

    def name(self, stripe: int) -> str:
        """Return the name, for messages, of the path of a stripe."""
        return self._paths[stripe].name

    @property
    def usable_first(self) -> list[int]:
        """Return all stripes, with those of failed and full paths at the end."""
        return sorted(range(len(self._paths)), key=self._full_or_failed)

    @property
    def any_usable(self) -> bool:
        """Return whether any path can be written to."""
        return not all(map(self._full_or_failed, range(len(self._paths))))

    def has_failed(self, stripe: int) -> bool:
        """Return whether the path of a stripe has failed; nothing is written to it any more."""
        return self._paths[stripe].failed

    def is_drives_error(self, error: OSError) -> bool:
        """Return whether there are several paths and an error is of a kind that a failed or full drive causes."""
        return len(self._paths) > 1 and error.errno in _FAILED | _FULL

    def choose(self, name: str, unit: int, nbytes: int) -> int:
        """Return the stripe for new space of `nbytes` in unit number `unit` of a name: the one that the unit had, while
        it may stay there; else the one with the fewest bytes for its weight.
        """
        if len(self._paths) == 1:
            return 0
        known = self._stripes.get((name, unit))
        if known is not None and not self._full_or_failed(known) and not self._has_too_much(known, nbytes):
            return known
        best = min(self._usable(), key=lambda stripe: self._relative_load(stripe, nbytes))
        if known is not None:
            self._paths[known].placed -= nbytes
        self._paths[best].placed += nbytes
        self._stripes[name, unit] = best
        return best

    def should_move(self, stripe: int, nbytes: int, *, entirely: bool) -> bool:
        """Return whether `nbytes` that are allocated on a stripe are to be written elsewhere: its path failed, or, if
        they are all bytes of their allocation (`entirely`), it has more than its weight allows. False with a single
        path.
        """
        if len(self._paths) == 1:
            return False
        return (self._paths[stripe].failed and self.any_usable) or (entirely and self._has_too_much(stripe, nbytes))

    def refuse(self, stripe: int, error: OSError) -> bool:
        """Stop writing to a path if the `error` of a failed write is about its drive, and have `say` tell that; return
        whether the write can go to another path. A full path is tried again after the next seal, and when it has room.
        """
        path = self._paths[stripe]
        if error.errno in _FULL:
            path.note_full()
            what = "is full; what has no place there yet is written to the other paths"
        elif error.errno in _FAILED:
            path.failed = True
            what = "failed; from now on all is written to the other paths. What it holds is still read from it"
        else:
            return False
        if not self.any_usable:
            return False
        self._tell_once(path, "full" if error.errno in _FULL else "failed", f"{what}: {error}")
        return True

    def try_full_again(self) -> None:
        """Count full paths as usable again, since files may have been removed."""
        for path in self._paths:
            path.full = False

    def started(self, stripe: int, request: Request, nbytes: int, *, write: bool) -> None:
        """Count a transfer of `nbytes` as written or read; if there are several paths, also time it until it ends."""
        path = self._paths[stripe]
        if write:
            path.written += nbytes
        else:
            path.read += nbytes
        if len(self._paths) > 1:
            path.started(request, nbytes)

    def rebalance(self) -> None:
        """Count the transfers that have ended, and use full paths again that have room now. Once each path in use has
        moved enough bytes, compare their rates and change the weights of those that became slow or are slow no longer.
        """
        self._retry_paths_with_room()
        moved = [(path, path.count_ended()) for path in self._paths if not path.failed]
        # A full path may have nothing to move, so the others do not wait for it.
        usable = [path for path, nbytes in moved if nbytes >= WINDOW_BYTES or not path.full]
        if len(usable) < 2 or min(nbytes for path, nbytes in moved if path in usable) < WINDOW_BYTES:
            return
        rates = {path.name: path.take_rate() for path in usable}
        best = max(rates[path.name] / path.given for path in usable)
        for path in usable if best else ():
            reached = rates[path.name] / path.given / best
            path.slow = reached < SLOW_SHARE
            weight = path.given * reached if path.slow else path.given
            if path.slow:
                expected = best * path.given
                self._tell_once(
                    path,
                    "slow",
                    f"moves {rates[path.name] / 1e9:.3f} GB/s, {reached:.0%} of the {expected / 1e9:.3f} GB/s that its "
                    f"weight says beside the others; it gets fewer bytes until it is faster",
                )
            if max(weight, path.weight) > _WORTH_A_SHIFT * min(weight, path.weight):
                path.weight, self._shifting = weight, True

    def _retry_paths_with_room(self) -> None:
        """Count paths that were full as usable again if they have room for half of the bytes by which they are below
        their share.
        """
        for path in self._paths:
            if path.short and not path.failed:
                placed, weight = sum(p.placed for p in self._paths), sum(p.weight for p in self._paths if not p.failed)
                lacks = placed * path.weight / weight - path.placed
                if path.has_room(max(1, int(lacks) // 2)):
                    path.full = path.short = False
                    self._shifting = True

    def tell_if_silent(self, stripe: int, seconds: float) -> None:
        """Tell users at once that a path has had transfers under way for more than `seconds` without one ending; once
        for each such silence. Needs no lock, and may be called with it; where `tell` raises a Warning, `say` tells it
        later.
        """
        path = self._paths[stripe]
        since_ns = path.unanswered_since_ns()
        silent = (time.monotonic_ns() - since_ns) / 1e9
        if since_ns and silent >= seconds and path.silent_since_ns != since_ns:
            path.silent_since_ns = since_ns
            text = (
                f"the path {path.name} of a store has not answered for {silent:.0f} s; what is written there and read "
                "from it is waited for. The kernel's log may say why"
            )
            try:
                self._tell(text)  # now, as the call under way may never end
            except Warning:
                self._unsaid.append(text)

    def say(self) -> None:
        """Pass what is new about the paths to `tell`, a sentence at a time; the caller does not hold the store's lock.
        Raises what `tell` raises; that sentence counts as told.
        """
        while self._unsaid:
            try:
                text = self._unsaid.popleft()
            except IndexError:  # another thread says it
                return
            self._tell(text)

    def path_use(self) -> tuple[PathUse, ...]:
        """Return a `PathUse` for each path, by stripe: its folder, name, share and state, and the bytes and speed of
        its transfers so far.
        """
        for path in self._paths:
            path.count_ended()
        total = sum(self._paths[stripe].weight for stripe in self._usable())
        found = []
        for stripe, path in enumerate(self._paths):
            share = path.weight / total if stripe in self._usable() else 0.0
            state = "failed" if path.failed else "full" if path.full else "slow" if path.slow else "in use"
            found.append(PathUse(path.folder, path.name, share, state, path.written, path.read, path.bytes_per_s))
        return tuple(found)

    def _usable(self) -> list[int]:
        """Return the stripes whose paths are neither full nor failed; all stripes if there are none."""
        found = [stripe for stripe in range(len(self._paths)) if not self._full_or_failed(stripe)]
        return found or list(range(len(self._paths)))

    def _full_or_failed(self, stripe: int) -> bool:
        """Return whether the path of a stripe is full or has failed, so that it gets no new bytes."""
        return self._paths[stripe].full or self._paths[stripe].failed

    def _relative_load(self, stripe: int, nbytes: int) -> float:
        """Return the bytes on a path with `nbytes` more, divided by its weight: the time they take, in an arbitrary
        unit.
        """
        return (self._paths[stripe].placed + nbytes) / self._paths[stripe].weight

    def _has_too_much(self, stripe: int, nbytes: int) -> bool:
        """Return whether `nbytes` of a path are better moved to another one: weights have changed, and the path's load
        is higher than another's would be with these bytes.
        """
        return self._shifting and self._relative_load(stripe, 0) > min(
            (self._relative_load(other, nbytes) for other in self._usable() if other != stripe), default=float("inf")
        )

    def _tell_once(self, path: _Path, topic: str, text: str) -> None:
        """Have the next `say` tell `text` about a path, unless something was told on the same topic ("full", "failed"
        or "slow").
        """
        if topic not in path.told:
            path.told.add(topic)
            self._unsaid.append(f"the path {path.name} of a store {text}")
