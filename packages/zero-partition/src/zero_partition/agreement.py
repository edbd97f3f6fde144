"""Agreement between ranks on what happens next, so that none waits for a collective that another will not issue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from zero_comm import CommError, Message

from .errors import STEP_DROPPED, EditRefusedError, PartitionError
from .messages import LockStep, Observations, StepNumber, decode_each, distinct
from .ordered_gathers import OrderedGathers
from .ordered_reductions import OrderedReductions
from .unit import Unit
from .user_edits import UserEdits
from .user_gradients import UserGradients

_REQUEST = "request"
DONE = "done in synced()"
END_OF_PASS = "end"


class ControlGroup(Protocol):
    """The process group for messages; `zero_comm.Control` is one. ``rank``: this rank; ``world_size``: their number."""

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""

    def exchange(self, message: Message, /) -> list[Message]:
        """Return every rank's message, in rank order; messages that are equal may be one object. Collective."""

    def check_same(self, messages: Sequence[Message], /) -> None:
        """Raise `DesyncError` unless all ``messages`` (in rank order) have the same kind, name and step."""


class Liveness:
    """The record of whether the engine works, or an earlier failure has ended it.

    ``abort``: tells the other ranks of this rank's failure, so that none waits for it. ``sharded``: parameters are
    sharded. ``half_written``: returns what has failed in the middle outside of `writing`, as an update that runs beside
    forward, and left weights and states of two steps; None for nothing. ``can_reopen``: the process groups can be made
    again after a failure (see reopening.py).

    Attributes:
        failure: the failure that has ended the engine, as text; empty while the engine works.
        interrupted: the operation that was writing weights or states when the engine ended, None for none.
        restart_ruled_out: no call can make the engine work again.
    """

    def __init__(
        self,
        abort: Callable[[BaseException], None],
        half_written: Callable[[], str | None],
        *,
        sharded: bool,
        can_reopen: bool = False,
    ) -> None:
        self._abort = abort
        self._half_written = half_written
        self._sharded = sharded
        self._can_reopen = can_reopen
        self._writes: list[str] = []
        self._left: str | None = None
        self.failure = ""
        self.interrupted: str | None = None
        self.restart_ruled_out = False

    @property
    def failed(self) -> bool:
        """Return whether an earlier failure has ended the engine."""
        return bool(self.failure)

    def half_written(self) -> str | None:
        """Return what has failed in the middle outside of `writing` and left weights and states of two steps, in words;
        None for nothing."""
        return self._half_written()

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Mark the block as one that writes shards, masters or states, which ``what`` names: if the block raises, they
        are inconsistent.

        If the engine ends by that failure, or before the ranks next meet, `interrupted` becomes ``what``. Not after an
        `EditRefusedError`, which means that nothing was written.
        """
        self._writes.append(what)
        try:
            yield
        except EditRefusedError:  # nothing was written
            raise
        except BaseException:
            self._left = self._left or what
            raise
        finally:
            self._writes.pop()

    def note_meeting(self) -> None:
        """Forget an earlier interrupted write, as all ranks have exchanged messages since: the write has not ended the
        engine. Do nothing inside `writing`."""
        if not self._writes:
            self._left = None

    def end(self, failure: BaseException) -> None:
        """End the engine on this rank because of ``failure``, tell the other ranks, and set the attributes that say so;
        do nothing if the engine has ended already. May wait for an update of this rank."""
        if not self.failed:
            self.failure = f"{type(failure).__name__}: {failure}"
            self.interrupted = self._writes[0] if self._writes else self._left
            self.restart_ruled_out = not self._can_reopen
            self._abort(failure)
            self.interrupted = self.interrupted or self.half_written()  # which may wait, as no rank does for this one

    def rule_out_restart(self, problem: BaseException) -> None:
        """Rule out a restart of the ended engine, as making its process groups again has failed with ``problem``."""
        self.restart_ruled_out = True
        self.failure = f"{self.failure}. Then: {problem}"

    def revive(self) -> None:
        """Make the ended engine work again, after its process groups were made again."""
        self.failure, self.interrupted, self._left = "", None, None

    def check(self) -> None:
        """Raise `CommError`, which says what to do, if an earlier failure has ended the engine."""
        if not self.failed:
            return
        if self.interrupted is None and not self.restart_ruled_out:
            raise CommError(
                f"this engine has failed earlier: {self.failure}. This rank's weights are those before the step under "
                "way. If that is true of every rank, engine.save_checkpoint(...), reading weights and "
                "engine.zero_grad(), called on all of them, make the process groups again, and after "
                "engine.zero_grad() training continues with the next batch; else they name the rank."
            )
        here = (
            "What this rank has of the weights is its shards, which cannot be gathered any more."
            if self._sharded
            else "The model's parameters are replicated on this rank: torch.save(model.state_dict()) writes them."
        )
        raise CommError(
            f"this engine has failed earlier and cannot continue: {self.failure}. {here} Make a new engine on every "
            "rank and load a checkpoint."
        )


class Agreement:
    """Exchanges messages among the ranks of one engine at the points that all of them reach.

    Every rank reaches the same agreement points in the same order: the start and the end of a forward or backward pass
    that gathers, the step, a gather by the user. Each message also carries what the rank has observed since the last
    one (`Observations`).

    [Note: requests] Within a pass, gathers follow the agreed order and each unit comes once. A rank may need a unit
    that the order cannot give: it was released already, or the order lacks it. That rank joins the rest of the order
    and then sends a *request* in place of a message. The other ranks receive the request at their next agreement point,
    whichever that is, gather the unit with it, and send their own message again. So no rank hangs, and none has to
    guess what another will compute. Every pass ends with an agreement point, because the code that follows may wait for
    all ranks without serving requests: a collective of the user's.

    ``control``: sends the messages. ``liveness``: knows whether the engine works. ``units``: all, by index. ``step``:
    number of the messages. ``gathers``, ``reductions``, ``edits``, ``user_gradients``: give what was observed, and
    learn from what all ranks did.

    Attributes:
        synced: inside `Runtime.synced`: some ranks may begin a forward pass while others are done (see `meet_done`).
    """

    def __init__(
        self,
        control: ControlGroup,
        liveness: Liveness,
        units: Sequence[Unit],
        step: StepNumber,
        gathers: OrderedGathers,
        reductions: OrderedReductions,
        edits: UserEdits,
        user_gradients: UserGradients,
    ) -> None:
        self._control = control
        self._liveness = liveness
        self._units = units
        self._step = step
        self._gathers = gathers
        self._reductions = reductions
        self._edits = edits
        self._user_gradients = user_gradients
        self._sharded = any(unit.releasable for unit in units)
        self._changed: set[int] = set()
        self.synced = False

    def agree(self, kind: str, name: str, payload: Any = None) -> list[Any]:
        """Exchange a message of ``kind`` and ``name`` with all ranks, an agreement point of that name, and apply what
        the ranks have observed. Return every rank's ``payload`` (plain data) in rank order. Collective.

        Serves requests of other ranks first, and outside a pass releases the units given to
        `OrderedGathers.note_outside`. Raises `DesyncError`, listing every rank's call, when they differ;
        `PartitionError` when user code on the ranks has changed different things; `CommError` when the engine has
        ended.
        """
        self._liveness.check()
        if not self._gathers.active:
            self._gathers.release_outside()
        messages = self._exchange(self._message(kind, name, payload))
        self._liveness.note_meeting()
        self._control.check_same([m for m in messages if not (self.synced and m.kind == DONE)])
        return self._learn(messages, kind)

    def agree_in_lock_step(self, message: LockStep) -> list[LockStep]:
        """Exchange ``message`` with all ranks before a wait in a backward pass that is in lock step (see
        `Interleaving.begin`); return all of them in rank order. Collective."""
        return decode_each(LockStep.decode, self.agree("learning", "", message.encode()))

    def meet_done(self) -> str | None:
        """Meet the other ranks inside ``synced()`` when this rank has nothing left to do. Collective.

        Return the name of the module whose forward pass some rank begins, and which this rank has to join; None when
        all ranks are done. Serves requests, and stays in the meeting while other ranks end passes. Raises as `agree`
        does.
        """
        while True:
            self._liveness.check()
            messages = self._exchange(self._message(DONE, "", None))
            running = [message for message in messages if message.kind != DONE]
            self._control.check_same(running)
            self._learn(messages, DONE)
            if not running or running[0].kind != END_OF_PASS:
                return running[0].name if running else None

    def request(self, unit: int) -> None:
        """Gather the unit with index ``unit`` outside the order, together with every rank; return when the gather is
        issued, for the caller to wait for. The other ranks join at their next agreement point. Collective."""
        self._serve_requests(self._control.exchange(Message(_REQUEST, "", self._step.value, unit)))

    def note_changed(self, unit: Unit) -> None:
        """Record that this rank alone has changed the weights in its shard of ``unit``.

        At the next agreement point all ranks drop what they have gathered of it elsewhere (`Unit.forget_copies`).
        """
        self._changed.add(unit.index)

    def reset(self) -> None:
        """Forget observations that were not sent yet, leave ``synced()``, and have the next gather of each unit run
        over all ranks."""
        self.synced = False
        self._changed.clear()
        for unit in self._units:
            unit.forget_copies()

    def _message(self, kind: str, name: str, payload: Any) -> Message:
        """Return a message of ``kind`` and ``name``, at the present step, with ``payload`` and this rank's
        observations, which count as sent from then on."""
        observed = Observations(
            gathers=self._gathers.take_observed() if self._sharded else {},
            reductions=self._reductions.observed(),
            changed=sorted(self._changed),
            edits=self._edits.report(kind, in_pass=self._gathers.active),
            discards=self._user_gradients.discards,
        )
        self._changed.clear()
        return Message(kind, name, self._step.value, [payload, *observed.encode()])

    def _learn(self, messages: Sequence[Message], kind: str) -> list[Any]:
        """Apply the observations in all ranks' ``messages`` (by rank), alike on every rank; return the payloads in rank
        order.

        ``kind``: of this rank's message. Raises `PartitionError` where user code has changed different things on the
        ranks.
        """
        observed = decode_each(lambda payload: Observations.decode(payload[1:]), [m.payload for m in messages])
        told = distinct(observed)
        if any(one.gathers for one in told):
            self._gathers.learn([one.gathers for one in told])
        if any(one.reductions for one in told):
            self._reductions.learn([one.reductions for one in told])
        for index in {index for one in told for index in one.changed}:
            self._units[index].forget_copies()
        with self._liveness.writing("what user code has changed"):
            self._edits.settle([one.edits for one in observed], kind)
        if len({one.discards for one in told}) > 1:
            raise _different_discards([one.discards for one in observed])
        return [message.payload[0] for message in messages]

    def _exchange(self, message: Message) -> list[Message]:
        """Exchange ``message`` with all ranks, again after every round in which a rank has requested a unit, which is
        gathered; return every rank's message in rank order. Collective."""
        while True:
            messages = self._control.exchange(message)
            if not self._serve_requests(messages):
                return messages

    def _serve_requests(self, messages: Sequence[Message]) -> bool:
        """Issue the gathers of the units that ``messages`` (by rank) request, with all ranks, in the order of the
        ranks; return whether any was requested. Collective."""
        wanted = dict.fromkeys(m.payload for m in distinct(messages) if m.kind == _REQUEST)
        mine = messages[self._control.rank]
        for unit in wanted:
            self._gathers.serve_request(unit, mine.kind == _REQUEST and mine.payload == unit)
        return bool(wanted)


def _different_discards(discards: Sequence[int]) -> PartitionError:
    """Return the error for ranks that have discarded different averaged gradients (`zero_grad` after some were
    averaged). ``discards``: by rank, a digest of what it has discarded; 0 for nothing."""
    apart = next(rank for rank, other in enumerate(discards) if other != discards[0])
    did, did_not = (0, apart) if discards[0] else (apart, 0)
    how = "discarded others, or at another point" if discards[did_not] else "did not"
    return PartitionError(
        f"rank {did} discarded gradients that were averaged already (zero_grad) and rank {did_not} {how}: "
        f"each rank would be left with a part. Call zero_grad on every rank at the same point. {STEP_DROPPED}"
    )
