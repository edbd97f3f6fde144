"""The last collectives of this rank, in a file that a watcher can read while the rank hangs.

[Note: flight recorder format 1] All numbers are little-endian. A header of 64 bytes: magic `ZCRING01`, slots (u32),
bytes per slot (u32), rank (u32), world size (u32), entries written so far (u64), the entry that this rank waits for or
0 (u64), entries finished so far (u64), the first entry whose wait failed since one succeeded or 0 (u64), padding.
Then the slots; entry n (from 1) is in slot (n - 1) mod slots: its number (u64), its sequence in its group (u64), step
(i64; -1: none), bytes that must be equal on every rank or 0 (u64), seconds since the epoch (f64), and four zero-padded
UTF-8 strings: group (24 bytes), phase (16), name (112; of a longer one its end), call site (64). A reader takes entries
up to the header's count, which is written after the slot.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import sys
import threading
import time
from collections import Counter, deque
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import FrameType

import torch

from .tag import Tag

RECORDER_VARIABLE = "ZERO_COMM_RING"
"""The environment variable that names the file; a launcher sets it. Without it nothing is recorded."""
_SLOTS = 1024
_STANDS_AFTER = 5.0  # seconds in which an accelerator finishes no collective: it may compute for some time
_HEADER = struct.Struct("<8sIIIIQQQ")
_COUNT, _WAITING, _FINISHED, _FAILED = 3, 4, 5, 6  # of the header's 8-byte words
_SLOT = struct.Struct("<QQqQd24s16s112s64s")
_HEADER_BYTES = 64
_LIBRARIES = (
    "<",
    os.path.dirname(os.path.dirname(torch.__file__)),
    os.path.dirname(__file__),
    contextlib.__file__,  # torch's and our own calls pass through its decorators
)


class FlightRecorder:
    """Writes entries into a mapped file; see [Note: flight recorder format 1]. An entry is one collective of this rank;
    its number counts from 1.

    ``path``: of the file, which replaces any that is there. ``rank``, ``world_size``: for its header. ``slots``: number
    of entries that it keeps.
    """

    def __init__(self, path: Path, *, rank: int, world_size: int, slots: int = _SLOTS) -> None:
        size = _HEADER_BYTES + slots * _SLOT.size
        scratch = path.with_name(f"{path.name}.part")
        scratch.write_bytes(_HEADER.pack(b"ZCRING01", slots, _SLOT.size, rank, world_size, 0, 0, 0).ljust(size, b"\0"))
        with scratch.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        scratch.replace(path)  # a watcher finds the file whole or not at all
        self._words = memoryview(self._map)[:_HEADER_BYTES].cast("Q")
        self._slots = slots
        self._count = 0
        self._on_device: deque[tuple[int, torch.Event]] = deque()
        self._moved_at = 0.0
        self._lock = threading.Lock()  # of the words but the count: the watch's thread calls `look_at_device` too
        self._named: Counter[str] = Counter()

    def label_group(self, group_name: str) -> bytes:
        """Return the name (UTF-8, up to 24 bytes) under which the entries of a new process group are recorded.
        ``group_name``: torch's name of it.

        Groups of the same name get a number behind it from the second on: names repeat when torch.distributed is
        destroyed and initialised again.
        """
        self._named[group_name] += 1
        count = self._named[group_name]
        return (f"{group_name[:18]}" if count == 1 else f"{group_name[:18]}#{count}").encode()[:24]

    def record(self, group: bytes, sequence: int, tag: Tag, same_bytes: int) -> int:
        """Write the entry of a collective that is about to start, and return its number (from 1).

        ``group``: from `label_group`. ``sequence``: of the collective in its group. ``same_bytes``: see `Track.start`.
        """
        self.look_at_device()
        number = self._count + 1
        _SLOT.pack_into(
            self._map,
            _HEADER_BYTES + (self._count % self._slots) * _SLOT.size,
            number,
            sequence,
            tag.step,
            same_bytes,
            time.time(),
            group,
            _entry_text(tag.phase),
            _entry_text(tag.name),
            call_site(),
        )
        self._count = self._words[_COUNT] = number
        return number

    def begin_wait(self, number: int) -> None:
        """Record that this rank now blocks until entry ``number`` is complete."""
        with self._lock:
            self._words[_WAITING] = number

    def leave_to_device(self, number: int, complete: torch.Event) -> None:
        """Record that the wait for entry ``number`` is over for the host, and that the entry is complete with the event
        ``complete``, for which the accelerator's streams wait."""
        with self._lock:
            if not self._on_device:
                self._moved_at = time.monotonic()
            self._on_device.append((number, complete))
            self._words[_WAITING] = 0
        self.look_at_device()

    def look_at_device(self) -> None:
        """Count the entries of `leave_to_device` that the accelerator has finished since the last look. If none has
        finished for 5 s, record the first unfinished one as the entry that this rank waits for, unless the host waits
        for another. Never blocks; any thread may call it."""
        if not self._on_device:
            return
        with self._lock:
            first = self._on_device[0][0] if self._on_device else 0
            while self._on_device and self._on_device[0][1].query():
                self._on_device.popleft()
                self._words[_FINISHED] += 1
                self._moved_at = time.monotonic()
            if self._words[_WAITING] in (0, first):
                stands = bool(self._on_device) and time.monotonic() - self._moved_at >= _STANDS_AFTER
                self._words[_WAITING] = self._on_device[0][0] if stands else 0

    def fail_wait(self, number: int) -> None:
        """Record that the wait for entry ``number`` ended with an error: this rank no longer waits for it. The header
        keeps the first such entry until a wait succeeds."""
        with self._lock:
            self._words[_FAILED] = self._words[_FAILED] or number
            self._words[_WAITING] = 0

    def end_wait(self) -> None:
        """Record that the wait that `begin_wait` recorded has ended well: its entry is complete. Forgets the entry of
        `fail_wait`."""
        with self._lock:
            self._words[_WAITING] = self._words[_FAILED] = 0
            self._words[_FINISHED] += 1
        self.look_at_device()


class Track:
    """Numbers the entries of one process group, so that ranks can be compared entry by entry.

    ``group_name``: torch's name of the group. Without a flight recorder (`process_recorder`) it does nothing.
    """

    def __init__(self, group_name: str) -> None:
        self._recorder = process_recorder()
        self._group = b"" if self._recorder is None else self._recorder.label_group(group_name)
        self._sequence = 0

    def start(self, tag: Tag, same_bytes: int) -> Ticket | None:
        """Record the collective ``tag``, which is about to start, and return the ticket to wait with; None without a
        recorder.

        ``same_bytes``: bytes that must be equal on all ranks, for a reader of the file to compare (0: they may differ).
        """
        if self._recorder is None:
            return None
        self._sequence += 1
        return Ticket(self._recorder, self._recorder.record(self._group, self._sequence, tag, same_bytes))


class Ticket:
    """The entry ``number`` of ``recorder``: a context manager around the wait for its collective, which records that
    this rank waits, and how the wait ends."""

    __slots__ = ("_complete", "_number", "_recorder")

    def __init__(self, recorder: FlightRecorder, number: int) -> None:
        self._recorder = recorder
        self._number = number
        self._complete: torch.Event | None = None

    def ends_with(self, complete: torch.Event) -> None:
        """Record, inside the context, that the wait has only ordered streams: the entry will be complete when the event
        ``complete`` is."""
        self._complete = complete

    def __enter__(self) -> None:
        """Record that this rank now waits for the entry."""
        self._recorder.begin_wait(self._number)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Record that the wait is over: the entry is complete, or will be with the event of `ends_with`, or the wait
        ended with ``error``.
        """
        if error is None and self._complete is not None:
            self._recorder.leave_to_device(self._number, self._complete)
        elif error is None:
            self._recorder.end_wait()
        else:
            self._recorder.fail_wait(self._number)


@functools.cache
def process_recorder() -> FlightRecorder | None:
    """Return this process's flight recorder, made at the first call; None if the environment variable
    `RECORDER_VARIABLE` names no file. Rank and world size are those of RANK and WORLD_SIZE. Raises OSError when the
    file cannot be written."""
    path = os.environ.get(RECORDER_VARIABLE)
    if not path:
        return None
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return FlightRecorder(Path(path), rank=rank, world_size=world_size)


@functools.lru_cache(maxsize=4096)
def _entry_text(text: str) -> bytes:
    """Return the UTF-8 of ``text`` for a slot's string; of a long one the last 112 bytes."""
    return text.encode()[-112:]


def call_site() -> bytes:
    """Return the innermost line of the user's code that led to the caller of this function, as `train.py:31`, up to 64
    bytes; empty if there is none. Files of libraries (`is_library`) are passed over."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename  # a string keeps its hash, a code object does not
        if not is_library(path):
            return _file_and_line(path, frame.f_lineno)
        frame = frame.f_back
    return b""


@functools.lru_cache(maxsize=4096)
def is_library(path: str) -> bool:
    """Return whether the source file ``path`` belongs to torch, to the zero packages or to the interpreter's frozen
    modules.

    A zero package is imported by a name that begins with `zero_`, and a distribution of that name is installed.
    """
    if path.startswith(_LIBRARIES):
        return True
    names = {part for part in path.split(os.sep) if part.startswith("zero_")}
    return any(_is_in_package(path, name) and _is_distribution(name) for name in names)


def _is_in_package(path: str, name: str) -> bool:
    """Return whether the source file ``path`` lies in the folder of the imported package ``name``; False if it is not
    imported."""
    origin = getattr(sys.modules.get(name), "__file__", None)
    return origin is not None and path.startswith(os.path.dirname(origin) + os.sep)


@functools.cache
def _is_distribution(name: str) -> bool:
    """Return whether a distribution (installed package) called ``name`` is installed."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _file_and_line(path: str, line: int) -> bytes:
    """Return `train.py:31` as bytes for the file at ``path`` and ``line``; of a long one the last 64 bytes."""
    return f"{os.path.basename(path)}:{line}".encode()[-64:]
