"""Small messages that keep the ranks in agreement, and that say what went wrong when they are not."""

from __future__ import annotations

import functools
import json
import operator
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from .errors import CommError, DesyncError, PeerError
from .flight_recorder import Track
from .leaving import close_at_exit, leave
from .ledger import Ledger
from .meeting import meet
from .tag import Tag
from .topology import ONE_NODE, Topology
from .watch import Watch
from .watched import Watched
from .work import Work

_FRAME_BYTES = 512
_DIRECT_RANKS = 16  # up to here every rank writes to every other; above, gloo's own all-gather is cheaper
_FAILURE_KEY = "zero_comm/failure"
_FAILED = "failed"


@dataclass(frozen=True)
class Message:
    """One rank's words at an agreement point: a kind, a name, the step, plain data (JSON), and, which `Control` fills
    in, how many micro-batches it has counted, its wish and what it announces (see `Watched`)."""

    kind: str
    name: str
    step: int
    payload: Any = None
    micro_batches: int = 0
    wish: int = 0
    announced: int = 0

    def __str__(self) -> str:
        after = f" after {self.micro_batches} micro-batches" if self.micro_batches else ""
        return f"{self.kind} '{self.name}' in step {self.step}{after}"

    def same_call(self, other: Message) -> bool:
        """Return whether both ranks are at the same point (payloads may differ)."""
        return (self.kind, self.name, self.step) == (other.kind, other.name, other.step)


class Control:
    """Exchanges one `Message` per rank over a CPU (gloo) group; every rank receives all of them in rank order.

    Messages of up to 500 bytes travel in one fixed frame; larger ones announce their size in it and follow.

    Attributes:
        topology: which ranks are on one node; all of them until `place`.
        watched: where this rank is, for a `Watch`.
        is_torn: an exchange was left before its end, so that this rank's next one would meet another of its peers'.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, ledger: Ledger | None = None) -> None:
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.world_size = 1 if process_group is None else dist.get_world_size(process_group)
        self.ledger = ledger if ledger is not None else Ledger()
        self.topology: Topology = ONE_NODE
        self.watched = Watched()
        self._watch: Watch | None = None
        self.reopen(process_group)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The gloo group underneath; None for a single rank."""
        return self._process_group

    def reopen(self, process_group: dist.ProcessGroup | None) -> None:
        """Go on over ``process_group``, of the same ranks, after `close`; `place` and `watch` follow."""
        self._process_group = process_group
        self._sequence = 0
        self.is_torn = False
        self._verdict: str | None = None
        self._noted = False
        self.watched.failed = self.watched.waiting = None
        self._name = "" if process_group is None else process_group.group_name
        if process_group is not None:
            self._store = PrefixStore(_FAILURE_KEY, dist.distributed_c10d._get_default_store())
            self._stays = close_at_exit(self)
        self._track = Track(self._name)

    def meet_again(self, call: str, payload: Any, patience: float) -> list[Any]:
        """After `close`: return every rank's ``payload`` (plain data) in rank order once all have called this.

        Raises `PeerError` on every rank when one has not come ``patience`` seconds after another; see `meet`.
        """
        if self.world_size == 1:
            return [payload]
        store = PrefixStore(f"{self._name} again", self._store)
        return meet(store, self.rank, self.world_size, call, payload, patience)

    def exchange(self, message: Message) -> list[Message]:
        """Return every rank's message. Raises `PeerError` when a rank is gone, has aborted, or is in `confer`."""
        messages = self._exchange(message)
        failed = next(((rank, m) for rank, m in enumerate(messages) if m.kind == _FAILED), None)
        if failed is not None:
            raise PeerError(f"rank {failed[0]} failed: {failed[1].payload[0]}; here: {message}")
        self.watched.failed = None
        self.watched.agreed = max(self.watched.agreed, max(m.wish for m in messages))
        self.watched.heard = functools.reduce(operator.or_, (m.announced for m in messages))
        if self._noted:
            self._noted = not self._store.delete_key(self._note_key(self.rank))
        return messages

    def confer(self, call: str, step: int, reason: str, payload: Any, patience: float) -> list[Any] | None:
        """After this rank failed in ``call``: return every rank's payload when all have failed in it, else None.

        Ranks that are at an `exchange` learn ``reason``. Waits ``patience`` seconds at most; after None this rank has
        to `abort`.
        """
        try:
            messages = self._exchange(Message(_FAILED, call, step, [reason, payload]), timedelta(seconds=patience))
        except CommError:
            return None
        together = all(m.same_call(messages[0]) for m in messages)
        return [m.payload[1] for m in messages] if together else None

    def _exchange(self, message: Message, patience: timedelta | None = None) -> list[Message]:
        own = self.watched
        message = replace(message, micro_batches=own.micro_batches, wish=own.wish, announced=own.announced)
        fields = [message.kind, message.name, message.step, message.payload, message.micro_batches]
        rare = [message.wish, message.announced]
        body = json.dumps([*fields, *rare] if any(rare) else fields).encode()
        if self.world_size == 1:
            return [_decode(body)]
        tag = Tag("control", message.kind, message.step)
        self.is_torn = True
        frames = self._all_gather(_frame(body), tag, message, patience)
        lengths = [int.from_bytes(frame[:4], "little") for frame in frames]
        inline = _FRAME_BYTES - 4
        bodies = [frame[4 : 4 + length] for frame, length in zip(frames, lengths, strict=True)]
        if max(lengths) > inline:
            rest = max(lengths) - inline
            tails = self._all_gather(body[inline:].ljust(rest, b" "), tag, message, patience)
            bodies = [(head + tail)[:length] for head, tail, length in zip(bodies, tails, lengths, strict=True)]
        self.is_torn = False
        self.watched.last = message
        return [_decode(b) for b in bodies]

    def agree(self, message: Message) -> list[Any]:
        """Exchange ``message`` and return every rank's payload; all ranks must be at the same call.

        Raises `DesyncError` that lists what each rank was doing when they are not.
        """
        messages = self.exchange(message)
        self.check_same(messages)
        return [m.payload for m in messages]

    def place(self, node: str) -> None:
        """Tell the other ranks which node this rank is on (any name), and learn theirs. Collective."""
        told = self.agree(Message("topology", "", 0, [node, uuid.uuid4().hex]))
        self.topology = Topology(tuple(name for name, _ in told))
        self._name = f"{self._name} {told[0][1]}"  # groups of an earlier initialisation had the same names

    def check_same(self, messages: Sequence[Message]) -> None:
        """Raise `DesyncError` unless all ``messages`` (in rank order) are of the same call."""
        if all(m.same_call(messages[0]) for m in messages):
            return
        listing = "\n".join(f"  rank {rank}: {m}" for rank, m in enumerate(messages))
        raise DesyncError(
            f"the ranks are at different calls:\n{listing}\n"
            "Every rank must make the same engine calls in the same order "
            "(forward, backward, step, save, load, gathered, destroy)."
        )

    def abort(self, reason: str) -> None:
        """Leave, and let every rank that waits for this one know why. Does not wait for anybody.

        [Note: the first cause] A message to a rank that is not listening is lost when the sender's process ends, so the
        reason goes into the store of the process group. The first one stays: ranks that fail because another failed
        find it there, whichever connection told them that something is wrong.
        """
        self.tell(reason)
        self.close()

    def tell(self, reason: str) -> None:
        """Leave ``reason`` for the ranks that will miss this one; see `abort`."""
        if self._process_group is not None:
            with suppress(RuntimeError):  # the store went with the rank that kept it
                value = json.dumps([self.rank, f"failed: {reason}"])
                self._store.compare_set(self._name, "", value)

    def give_up(self, reason: str) -> None:
        """A watch has found that waiting has no end; ``reason`` is what this rank did, for the others and itself."""
        self._verdict = reason
        with suppress(RuntimeError):
            self._store.compare_set(self._name, "", json.dumps([self.rank, reason]))

    def note(self, reason: str) -> None:
        """Say why this rank may not come back, though nobody waits for it now: `explain` has it until the next
        `exchange`, unless a rank tells a cause of its own."""
        if self._process_group is not None:
            with suppress(RuntimeError):
                self._store.set(self._note_key(self.rank), json.dumps([self.rank, reason]))
                self._noted = True

    def failed(self, reason: str) -> None:
        """`note` that a call of this rank failed; its watch gives up when others wait and no further call comes."""
        self.note(f"failed: {reason}")
        self.watched.failed = (reason, time.monotonic())

    def goes_on(self) -> None:
        """This rank makes another call after one that failed."""
        self.watched.failed = None
        self.watched.excused = id(sys.exc_info()[1])

    def _note_key(self, rank: int) -> str:
        return f"{self._name} note {rank}"

    def explain(self, error: CommError) -> CommError:
        """The better error when a rank has told why it left, else ``error``."""
        if self._process_group is None:
            return error
        notes = (self._note_key(rank) for rank in range(self.world_size) if rank != self.rank)
        try:
            store = self._store
            key = next((k for k in (self._name, *notes) if store.check([k])), None)
            if key is None:
                return error
            rank, reason = json.loads(store.get(key))
        except RuntimeError:  # the store went with the rank that kept it
            return error
        if rank == self.rank:
            return error if self._verdict is None else PeerError(f"this rank {self._verdict}")
        return PeerError(f"rank {rank} {reason}; here: {error}")

    def watch(self, sever: Callable[[], object], stopped_after: float) -> None:
        """Start the thread that looks after this rank and those it waits for (see [Note: the watch]); none for a single
        rank. ``sever`` ends every wait, on this rank and on others. Call it after `place`; `end_watch` stops it."""
        if self._process_group is None:
            return

        def give_up(reason: str) -> None:
            self.give_up(reason)
            sever()

        store = PrefixStore(self._name, self._store)
        self._watch = Watch(
            self.watched, store, self.rank, self.world_size, give_up, self.note, stopped_after=stopped_after
        )

    def end_watch(self) -> None:
        """End the thread of `watch`, if there is one."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()

    def close(self) -> None:
        """Give the process group back."""
        if self._process_group is not None:
            self._stays()
            leave(self._process_group)
            self._process_group = None

    def _all_gather(self, body: bytes, tag: Tag, doing: Message, patience: timedelta | None) -> list[bytes]:
        if self.world_size > _DIRECT_RANKS:
            received = [torch.empty(len(body), dtype=torch.uint8) for _ in range(self.world_size)]
            self._count(tag, len(body))
            ticket = self._track.start(tag, 0)
            work = dist.all_gather(received, _tensor(body), group=self._process_group, async_op=True)
            gathering = Work(
                tag,
                [(work, None)],
                ticket=ticket,
                explain=self.explain,
                watched=self.watched,
                ledger=self.ledger,
            )
            gathering.wait(patience)
            return [bytes(r.numpy()) for r in received]
        awaited: int | None = None
        ticket = self._track.start(tag, 0)
        self.watched.waiting = (doing, time.monotonic(), True)
        try:
            began = time.perf_counter()
            received_by_rank, pending = self._start(body, tag)
            before = time.perf_counter()
            with ticket or nullcontext():
                for peer, arrival in pending:
                    awaited = peer
                    arrival.wait(*(() if patience is None else (patience,)))
            now = time.perf_counter()
            self.ledger.arrived(tag, now - began, now - before)
        except RuntimeError as error:
            who = "a rank" if awaited is None else f"rank {awaited}"
            failure = PeerError(f"{who} left or did not answer while this rank was at {doing}: {error}")
            raise self.explain(failure) from error
        finally:
            self.watched.waiting = None
        return [bytes(r.numpy()) for r in received_by_rank]

    def _count(self, tag: Tag, nbytes: int) -> None:
        self.ledger.count(tag, nbytes * (self.world_size - 1), nbytes * self.topology.far_peers(self.rank))

    def _start(self, body: bytes, tag: Tag) -> tuple[list[torch.Tensor], list[tuple[int, Any]]]:
        """Send ``body`` to every rank and start receiving theirs."""
        self._sequence = (self._sequence + 1) % (1 << 30)
        self._count(tag, len(body))
        mine = _tensor(body)
        received = [mine if r == self.rank else torch.empty_like(mine) for r in range(self.world_size)]
        pending: list[tuple[int, Any]] = []
        for distance in range(1, self.world_size):
            source, target = (self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size
            arrival = dist.irecv(received[source], group=self._process_group, group_src=source, tag=self._sequence)
            departure = dist.isend(mine, group=self._process_group, group_dst=target, tag=self._sequence)
            pending += [(source, arrival), (target, departure)]
        return received, pending


def _frame(body: bytes) -> bytes:
    return (len(body).to_bytes(4, "little") + body[: _FRAME_BYTES - 4]).ljust(_FRAME_BYTES, b"\0")


def _tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _decode(body: bytes) -> Message:
    return Message(*json.loads(body))
