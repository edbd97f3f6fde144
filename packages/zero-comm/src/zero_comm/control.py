"""Small messages by which the ranks agree, and by which a rank that fails tells the others why.

The store is torch's key-value store, through which process groups are made; it works also when a group is broken. The
watch is a thread of each rank (`watch.py`) that logs whom its rank waits for. It gives up where a wait would never end:
it stores the reason and cuts its rank's connections, so that every rank raises.
"""

from __future__ import annotations

import functools
import operator
import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from .errors import CommError, DesyncError, PeerError
from .failure_notes import FailureNotes
from .flight_recorder import Track
from .leaving import close_at_exit, destroy_group
from .ledger import Ledger
from .meeting import meet
from .message import FRAME_BYTES, Message, decode_message, distinct_messages, make_frame
from .stacks import describe_failure, excused_exceptions
from .tag import Tag
from .topology import ONE_NODE, Topology
from .vitals import carried_by_gloo, store_ports
from .watch import Watch
from .watched import Watched
from .work import Work

_DIRECT_RANKS = 16  # up to here every rank writes to every other; above, gloo's own all-gather is cheaper
_FAILURE_KEY = "zero_comm/failure"
_FAILED = "failed"


class Control:
    """Exchanges one `Message` per rank over a CPU (gloo) group; every rank receives all of them in rank order.

    ``process_group``: None for a single rank. ``ledger``: counts the messages' bytes and seconds; by default one of its
    own. Messages of up to 508 bytes travel in one frame of fixed size. For larger ones the frame holds the size, and
    the rest follows.

    A method that raises `PeerError` does so with the cause that a rank has stored, if there is one (`explain`).

    Attributes:
        rank, world_size: this rank's number in the group, and the group's size.
        topology: which ranks share a node; all do until `exchange_nodes`.
        watched: what this rank does and waits for; its watch reads it.
        is_torn: an exchange failed half-way: this rank's next one would be paired with a different one of its peers.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, ledger: Ledger | None = None) -> None:
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.world_size = 1 if process_group is None else dist.get_world_size(process_group)
        self.ledger = ledger if ledger is not None else Ledger()
        self.topology: Topology = ONE_NODE
        self.watched = self._shown = Watched()
        self._explain: Callable[[CommError], CommError] | None = None
        self._watch: Watch | None = None
        self.reopen(process_group)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's gloo group that carries the messages; None for a single rank. Raises `CommError` if there are several
        ranks and `close` was called."""
        self._require_open("its process group")
        return self._process_group

    @property
    def _takes_part(self) -> bool:
        """Whether this object has an open group of several ranks, and this process is the one that opened it, not a
        fork of that."""
        return self._process_group is not None and os.getpid() == self._process

    def reopen(self, process_group: dist.ProcessGroup | None) -> None:
        """Use ``process_group``, a new one of the same ranks (None for a single rank), after `close`, and forget that a
        call has failed. Call `exchange_nodes` and `watch` next. Sends nothing. The constructor calls it, too."""
        self._process_group = process_group
        self._process = os.getpid()
        self._sequence = 0
        self.is_torn = False
        self.watched.failed = self.watched.waiting = None
        self._name = "" if process_group is None else process_group.group_name
        if process_group is not None:
            self._store = PrefixStore(_FAILURE_KEY, dist.distributed_c10d._get_default_store())
            self._notes = FailureNotes(self._store, self._name, self.rank, self.world_size)
            self._cancel_close_at_exit = close_at_exit(self)
        self._track = Track(self._name)

    def meet_again(self, call: str, payload: Any, patience: float) -> list[Any]:
        """Wait, after `close`, until all ranks have called this, and return every rank's ``payload`` (JSON data) in
        rank order.

        It works without process groups, through the store. ``call`` names the user's call in errors. Raises `PeerError`
        on every rank when one has not called it ``patience`` seconds after another; see `meet`.
        """
        if self.world_size == 1:
            return [payload]
        store = PrefixStore(f"{self._name} again", self._store)
        return meet(store, self.rank, self.world_size, call, payload, patience)

    def exchange(self, message: Message) -> list[Message]:
        """Send ``message`` to every rank and return all ranks' messages in rank order. Collective.

        Ranks that sent the same message share one object. The ranks may be at different calls (`agree` refuses that).
        Updates the fields of `watched` about agreements and failures, and deletes this rank's `leave_note`. Raises
        `PeerError` when a rank is gone, has aborted, or is in `confer`, and `CommError` after `close` and in a forked
        process.
        """
        messages = self._exchange(message)
        told = distinct_messages(messages)
        if (failed := next((m for m in told if m.kind == _FAILED), None)) is not None:
            raise PeerError(f"rank {messages.index(failed)} failed: {failed.payload[0]}; here: {message}")
        self.watched.failed = None
        self.watched.agreed = max(self.watched.agreed, max(m.request for m in told))
        self.watched.heard = functools.reduce(operator.or_, (m.announced for m in told))
        if self._process_group is not None:
            self._notes.withdraw()
        return messages

    def confer(self, call: str, step: int, failure: BaseException, payload: Any, patience: float) -> list[Any] | None:
        """Find out, after ``failure`` of this rank in ``call`` of ``step``, whether all ranks failed in the same call.

        Return the ranks' ``payload`` (JSON data), in rank order, if they did, else None: then this rank must `abort`.
        None also if that is not known ``patience`` seconds after the call. A rank that is in `exchange` instead gets a
        `PeerError` there that names ``failure``.
        """
        reason = describe_failure(failure, f"in step {step}")
        try:
            messages = self._exchange(Message(_FAILED, call, step, [reason, payload]), patience)
        except CommError:
            return None
        together = all(m.same_call(messages[0]) for m in messages)
        return [m.payload[1] for m in messages] if together else None

    def _exchange(self, message: Message, patience: float | None = None) -> list[Message]:
        """Send ``message`` to every rank and return all ranks' messages in rank order, whatever they say; `exchange`
        and `confer` look at them. Collective.

        ``patience``: seconds for all waits together; None for the group's timeout in each. Sets `is_torn` while it
        runs, and leaves it set if it raises `PeerError`, when a rank is gone or does not answer. Raises `CommError`
        after `close` and in a forked process.
        """
        own = self.watched
        message = replace(message, micro_batches=own.micro_batches, request=own.request, announced=own.announced)
        body = message.encode()
        if self.world_size == 1:
            return [decode_message(body)]
        self._require_open(message)
        if not self._takes_part:
            raise CommError(
                f"{message}: this process ({os.getpid()}) was forked from rank {self.rank} (process {self._process}), "
                "which alone takes part in what the ranks do together; call the engine there, and hand data over."
            )
        tag = Tag("control", message.kind, message.step)
        deadline = None if patience is None else time.monotonic() + patience
        self.is_torn = True
        frames = self._all_gather(make_frame(body), tag, message, deadline)
        lengths = [int.from_bytes(frame[:4], "little") for frame in frames]
        inline = FRAME_BYTES - 4
        bodies = [frame[4 : 4 + length] for frame, length in zip(frames, lengths, strict=True)]
        if max(lengths) > inline:
            rest = max(lengths) - inline
            tails = self._all_gather(body[inline:].ljust(rest, b" "), tag, message, deadline)
            bodies = [(head + tail)[:length] for head, tail, length in zip(bodies, tails, lengths, strict=True)]
        self.is_torn = False
        self.watched.last = message
        decoded = {body: decode_message(body) for body in set(bodies)}
        return [decoded[body] for body in bodies]

    def agree(self, message: Message) -> list[Any]:
        """Exchange ``message`` and return every rank's payload in rank order; ranks that sent the same message share
        one payload object. Collective.

        Raises `DesyncError`, which lists every rank's call, when the ranks are at different calls (kind, name or step
        differ), and else as `exchange` does.
        """
        messages = self.exchange(message)
        self.check_same(messages)
        return [m.payload for m in messages]

    def exchange_nodes(self, node: str) -> None:
        """Set `topology` from every rank's ``node``, the name of the node that it is on, and add a random word to this
        group's keys in the store, so that no earlier group has the same. Collective. Raises as `agree` does."""
        told = self.agree(Message("topology", "", 0, [node, uuid.uuid4().hex]))
        self.topology = Topology(tuple(name for name, _ in told))
        self._name = f"{self._name} {told[0][1]}"  # groups of an earlier initialisation had the same names
        if self._process_group is not None:
            self._notes.name = self._name

    def check_same(self, messages: Sequence[Message]) -> None:
        """Raise `DesyncError`, which lists the ranks' calls, unless all ``messages`` (in rank order) have the same
        kind, name and step."""
        if all(m.same_call(messages[0]) for m in distinct_messages(messages)):
            return
        listing = "\n".join(f"  rank {rank}: {m}" for rank, m in enumerate(messages))
        raise DesyncError(
            f"the ranks are at different calls:\n{listing}\n"
            "Every rank must make the same engine calls in the same order "
            "(forward, backward, step, save, load, gathered, destroy)."
        )

    def abort(self, reason: str) -> None:
        """Report ``reason`` as this rank's failure (`report_failure`), and destroy the process group (`close`). Waits
        for the store, but for no other rank. The watch runs on until `end_watch`."""
        self.report_failure(reason)
        self.close()

    def report_failure(self, reason: str) -> None:
        """Store that this rank failed for ``reason``, unless a rank has reported a failure before; other ranks' errors
        then name the reason. See [Note: the first cause] in failure_notes.py. Does nothing for a single rank, in a
        forked process, and if the store is gone."""
        if self._takes_part:
            self._notes.report_failure(reason)

    def give_up(self, reason: str) -> None:
        """Store ``reason`` as why this rank left the others, unless a rank has reported a failure before; `explain`
        then names it in the others' errors and in this rank's own. The watch calls this, in its thread, when waiting
        would never end."""
        self._notes.give_up(reason)

    def leave_note(self, reason: str) -> None:
        """Store ``reason`` as why this rank may make no further call. The others' `explain` names it unless a rank has
        reported a failure. This rank's next `exchange` deletes it. Does nothing for a single rank, in a forked process,
        and if the store is gone."""
        if self._takes_part:
            self._notes.leave(reason)

    def record_failed_call(self, failure: BaseException, when: str) -> None:
        """Record that a call of this rank failed with ``failure``: in `watched`, and as a note for the other ranks
        (`leave_note`). ``when``: in words, as "in step 3". If others then wait while this rank makes no further call
        (`record_call`), its watch gives up."""
        reason = describe_failure(failure, when)
        self.leave_note(f"failed: {reason}")
        self.watched.failed = (reason, time.monotonic())

    def record_call(self) -> None:
        """Record in `watched` that this rank makes a call of the engine. Its watch then no longer gives up for a call
        that failed before, nor for an exception that the script is handling now; and no backward pass is expected any
        more."""
        self.watched.failed = None
        self.watched.excused = excused_exceptions()
        self.watched.owes_backward = False

    def record_forward(self) -> None:
        """Record in `watched` that this rank's forward pass is done, so that its backward pass should follow; the watch
        says so in its log until the next `record_call`."""
        self.watched.owes_backward = True

    def explain(self, error: CommError) -> CommError:
        """Return a `PeerError` with the cause of ``error`` if the store has one: the failure or the note of another
        rank, or why this rank's watch gave up. Return ``error`` itself if it has none, after `close`, when the store is
        gone, and when this rank reported the failure."""
        return error if self._process_group is None else self._notes.explain(error)

    def watch(self, sever: Callable[[], object], stopped_after: float) -> None:
        """Start this rank's watch thread; do nothing for a single rank. Call it after `exchange_nodes`; `end_watch`
        stops the thread.

        ``sever``: called when the watch gives up, to end every wait on this rank and on its peers. ``stopped_after``:
        seconds without an answer after which a rank that others wait for counts as gone; see [Note: the watch] in
        watch.py.
        """
        if self._process_group is None:
            return

        def give_up(reason: str) -> None:
            """Store ``reason``, and cut this rank's connections; the watch calls it when it gives up."""
            self.give_up(reason)
            sever()

        store = PrefixStore(self._name, self._store.clone())  # type: ignore[attr-defined]  # torch does not declare it
        self._watch = Watch(
            self.watched,
            store,
            self.rank,
            self.world_size,
            give_up,
            self.leave_note,
            carried=functools.partial(carried_by_gloo, store_ports(self._store)),
            stopped_after=stopped_after,
        )

    def show_waits(self, watched: Watched, explain: Callable[[CommError], CommError]) -> None:
        """Show in ``watched``, from now on, what this rank waits for in this group, and have ``explain`` replace
        errors: those of another `Control`, whose watch covers this group too."""
        self._shown, self._explain = watched, explain

    def end_watch(self) -> None:
        """Stop the thread that `watch` started, if there is one."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()

    def close(self) -> None:
        """Destroy the process group, without waiting for other ranks; after that only `meet_again` and `reopen` may be
        called. The watch runs on until `end_watch`. Does nothing if it was called before."""
        if self._process_group is not None:
            self._cancel_close_at_exit()
            destroy_group(self._process_group, self._process)
            self._process_group = None

    def _require_open(self, wanted: object) -> None:
        """Raise `CommError` if there are several ranks and `close` was called: torch would take the default group for
        None. ``wanted``: begins the error's text."""
        if self._process_group is None and self.world_size > 1:
            raise CommError(f"{wanted}: the control group of rank {self.rank} of {self.world_size} is closed")

    def _all_gather(self, body: bytes, tag: Tag, doing: Message, deadline: float | None) -> list[bytes]:
        """Return every rank's ``body`` (equal lengths) in rank order, and count its bytes under ``tag``; waits.
        Collective.

        ``doing``: the message that the watch and errors name. ``deadline``: by `time.monotonic`, for all waits; None
        for the group's timeout in each. Raises `PeerError` when a rank is gone or does not answer.
        """
        if self.world_size > _DIRECT_RANKS:
            received = [bytearray(len(body)) for _ in range(self.world_size)]
            tensors = list(map(_tensor_over, received))
            self._count(tag, len(body))
            ticket = self._track.start(tag, 0)
            work = dist.all_gather(tensors, _tensor_over(bytearray(body)), group=self._process_group, async_op=True)
            gathering = Work(
                tag,
                [(work, None)],
                ticket=ticket,
                explain=self._explain or self.explain,
                watched=self._shown,
                ledger=self.ledger,
            )
            gathering.wait(_time_left(deadline))
            return list(map(bytes, received))
        awaited: int | None = None
        ticket = self._track.start(tag, 0)
        self._shown.waiting = (doing, time.monotonic(), True)
        try:
            began = time.perf_counter()
            received_by_rank, pending = self._start_exchange(body, tag)
            before = time.perf_counter()
            with ticket or nullcontext():
                for peer, arrival in pending:
                    awaited = peer
                    arrival.wait(*(() if (left := _time_left(deadline)) is None else (left,)))
            now = time.perf_counter()
            self.ledger.count_seconds(tag, now - began, now - before)
        except RuntimeError as error:
            who = "a rank" if awaited is None else f"rank {awaited}"
            failure = PeerError(f"{who} left or did not answer while this rank was at {doing}: {error}")
            raise (self._explain or self.explain)(failure) from error
        finally:
            self._shown.waiting = None
        return list(map(bytes, received_by_rank))

    def _count(self, tag: Tag, nbytes: int) -> None:
        """Count in the ledger, under ``tag``, a message of ``nbytes`` bytes to every other rank; separately, the bytes
        that go to other nodes."""
        self.ledger.count(tag, nbytes * (self.world_size - 1), nbytes * self.topology.far_peers(self.rank))

    def _start_exchange(self, body: bytes, tag: Tag) -> tuple[list[bytearray], list[tuple[int, Any]]]:
        """Start to send ``body`` to every other rank and to receive theirs, which must have the same length; count the
        bytes under ``tag``.

        Return the receive buffers by rank (this rank's own holds ``body``), valid once all operations have been waited
        for, and the pending operations: (peer rank, torch's handle).
        """
        self._sequence = (self._sequence + 1) % (1 << 30)
        self._count(tag, len(body))
        received = [bytearray(body if r == self.rank else len(body)) for r in range(self.world_size)]
        tensors = list(map(_tensor_over, received))
        pending: list[tuple[int, Any]] = []
        for distance in range(1, self.world_size):
            source, target = (self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size
            arrival = dist.irecv(tensors[source], group=self._process_group, group_src=source, tag=self._sequence)
            departure = dist.isend(tensors[self.rank], group=self._process_group, group_dst=target, tag=self._sequence)
            pending += [(source, arrival), (target, departure)]
        return received, pending


def _time_left(deadline: float | None) -> timedelta | None:
    """Return the time until ``deadline`` (by `time.monotonic`), at least a millisecond, as gloo takes zero for no
    limit; None (no limit) for None."""
    return None if deadline is None else timedelta(seconds=max(0.001, deadline - time.monotonic()))


def _tensor_over(body: bytearray) -> torch.Tensor:
    """Return ``body`` as a uint8 tensor that shares its memory. The caller reads the bytes from ``body``, as
    `Tensor.numpy` would need NumPy."""
    return torch.frombuffer(body, dtype=torch.uint8)
