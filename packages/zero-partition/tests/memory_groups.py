"""Process groups of ranks that are threads of one process: they communicate and wait like real ones, in microseconds.

`run_threads` runs a function on several such ranks. A collective that some rank never issues, or that ranks issue in
different orders, fails with the name of what each rank was doing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from zero_comm import Control, Message, Tag, Work
from zero_partition.gradients import UnitGradients
from zero_partition.layout import UnitLayout
from zero_partition.live import LiveElements
from zero_partition.residency import DeviceResidency
from zero_partition.route import Route
from zero_partition.unit import Unit
from zero_partition.units import UnitPlan

PATIENCE = 20.0  # seconds; a rank that waits longer has a deadlock


class Mailbox:
    """What the ranks have posted to one group: for each rank a list, in the order of issue."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._posted: list[list[Any]] = [[] for _ in range(world_size)]
        self._names: list[list[str]] = [[] for _ in range(world_size)]
        self._changed = threading.Condition()
        self._abandoned = False

    def post(self, rank: int, name: str, value: Any) -> int:
        """Issue this rank's next collective; return its number."""
        with self._changed:
            self._posted[rank].append(value)
            self._names[rank].append(name)
            self._changed.notify_all()
            return len(self._posted[rank]) - 1

    def collect(self, number: int) -> list[Any]:
        """Wait until every rank has issued collective ``number``; return what they posted, in rank order."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._abandoned or self._all_have(number), PATIENCE)
            names = {names[number] for names in self._names if len(names) > number}
            if not arrived or not self._all_have(number):
                raise TimeoutError(f"collective {number} {names}: issued by ranks so: {self._names}")
            assert len(names) == 1, f"ranks issue different collectives at place {number}: {self._names}"
            return [posted[number] for posted in self._posted]

    def abandon(self) -> None:
        """A rank has failed: nobody has to wait for it."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def issued(self, rank: int) -> list[str]:
        """The names of what a rank has issued, in order."""
        return list(self._names[rank])

    def _all_have(self, number: int) -> bool:
        return all(len(posted) > number for posted in self._posted)


class _Arrival:
    def __init__(self, mailbox: Mailbox, number: int, take: Callable[[list[Any]], None]) -> None:
        self._mailbox, self._number, self._take = mailbox, number, take

    def wait(self, _timeout: timedelta = timedelta()) -> None:
        self._take(self._mailbox.collect(self._number))


def _fill(out: torch.Tensor, shards: list[torch.Tensor]) -> None:
    out.copy_(torch.cat(shards))


class MemoryGroup:
    """A data group: what `zero_comm.Group` offers for gathers and reductions."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox = mailbox
        self.rank = rank
        self.world_size = mailbox.world_size

    @property
    def issued(self) -> list[str]:
        """What this rank has issued, in order."""
        return self._mailbox.issued(self.rank)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Work:
        """Fill ``out`` with the ranks' shards."""
        number = self._mailbox.post(self.rank, f"{tag.phase} {tag.name}", shard.clone())
        return Work(tag, [(_Arrival(self._mailbox, number, lambda shards: _fill(out, shards)), None)])

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, tag: Tag, *, accumulate: bool = False) -> Work:
        """Average the ranks' ``flat`` into the owners' ``out``."""
        number = self._mailbox.post(self.rank, f"{tag.phase} {tag.name}", flat.clone())
        size = out.numel()

        def take(flats: list[torch.Tensor]) -> None:
            mine = sum(one[self.rank * size : (self.rank + 1) * size] for one in flats) / self.world_size
            out.copy_(out + mine if accumulate else mine)

        return Work(tag, [(_Arrival(self._mailbox, number, take), None)])


class MemoryControl:
    """A control group; messages travel as JSON, like real ones."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox = mailbox
        self.rank = rank
        self.world_size = mailbox.world_size
        self.is_torn = False
        self.sent: list[Message] = []

    def exchange(self, message: Message) -> list[Message]:
        """Return every rank's message."""
        self.sent.append(message)
        number = self._mailbox.post(self.rank, "message", json.dumps(asdict(message)))
        return [Message(**json.loads(text)) for text in self._mailbox.collect(number)]

    def check_same(self, messages: Sequence[Message]) -> None:
        """As `Control.check_same`."""
        Control(None).check_same(messages)


class MemoryRank:
    """One rank: its number, its three groups, and its shards."""

    def __init__(self, mailboxes: dict[str, Mailbox], rank: int) -> None:
        self.rank = rank
        self._mailbox = mailboxes["gather"]
        self.gather = MemoryGroup(mailboxes["gather"], rank)
        self.reduce = MemoryGroup(mailboxes["reduce"], rank)
        self.control = MemoryControl(mailboxes["control"], rank)
        self.residency = DeviceResidency()
        self.live = LiveElements()

    def broadcast(self, tensor: torch.Tensor, source: int, tag: Tag) -> None:
        """As `EngineGroups.broadcast`."""
        number = self._mailbox.post(self.rank, f"{tag.phase} {tag.name}", tensor.clone())
        tensor.copy_(self._mailbox.collect(number)[source])

    def unit(self, index: int, *, width: int = 4, releasable: bool = True, trainable: bool = True) -> Unit:
        """Unit ``index``: two parameters that hold ``100 * index`` and up, in float64."""
        name = f"u{index}"
        parameters = {f"{name}.{key}": nn.Parameter(torch.empty(width, dtype=torch.float64)) for key in "ab"}
        plan = UnitPlan(name, torch.float64, trainable, not releasable, parameters, {name: nn.Identity()})
        layout = UnitLayout.from_shapes(name, {key: p.shape for key, p in parameters.items()}, self.gather.world_size)
        route = Route(self.gather)  # type: ignore[arg-type]
        unit = Unit(index, plan, layout, route, self.residency, device=_CPU, releasable=releasable, live=self.live)
        values = torch.arange(layout.numel, dtype=torch.float64) + 100 * index
        unit.init_from_full(values, torch.float64, full_master=False)
        return unit

    def gradients(self, unit: Unit) -> UnitGradients:
        """The gradients of a unit, reduced on this rank's reduce group."""
        dtype = torch.float64
        return UnitGradients(
            unit, self.reduce, accumulate_dtype=dtype, wire_dtype=dtype, keep_flat=False, full_group=None
        )


_CPU = torch.device("cpu")


def run_threads(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call ``fn(rank, *args)`` with a `MemoryRank` for each of ``world_size`` threads; return the results by rank."""
    mailboxes = {name: Mailbox(world_size) for name in ("gather", "reduce", "control")}

    def run(rank: int) -> Any:
        try:
            return fn(MemoryRank(mailboxes, rank), *args)
        except BaseException:
            for mailbox in mailboxes.values():
                mailbox.abandon()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
        failures = [error for future in futures if (error := future.exception()) is not None]
        for error in failures:
            if not isinstance(error, TimeoutError):  # the others only missed this rank
                raise error
        return [future.result() for future in futures]
