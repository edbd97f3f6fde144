"""The process groups of sequence parallelism, which are also the model-parallel object (mpu) of an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from zero_comm import Connections, Control, EngineGroups, Group, Ledger, Message, open_group, starting_together

from .errors import SequenceError


class SequenceGroups:
    """The world as (data, sequence): each ``size`` consecutive ranks share the sequences of one batch.

    Ranks of a sequence group hold consecutive shards of the same samples, and compute attention together. Ranks with
    the same place in their sequence groups form a data group: they hold the same shard of different samples. An engine
    shards its states over all ranks, data times sequence. The methods are those of DeepSpeed's mpu. Make it by `open`.

    ``data_group``: torch's group of the data group; None for one rank. ``rows``: `sequence_rows` and `data_rows`.
    ``connections``: of all these groups, for the engine that they join.

    Attributes:
        rank: this rank's place in its sequence group.
        size: number of ranks of a sequence group.
        sequence: carries the exchanges of attention.
        batches: carries batches, on the CPU.
        control: small messages by which the ranks of a sequence group agree.
        sequence_rows, data_rows: the global ranks of every sequence group, and of every data group.
    """

    def __init__(
        self,
        sequence: Group,
        batches: Group,
        control: Control,
        data_group: dist.ProcessGroup | None,
        rows: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
        connections: Connections,
    ) -> None:
        self.sequence = sequence
        self.batches = batches
        self.control = control
        self.rank = sequence.rank
        self.size = sequence.world_size
        self._data = Group(data_group, ledger=sequence.ledger)
        self._connections = connections
        self._alone = Group(None)
        self.sequence_rows, self.data_rows = rows

    @classmethod
    def open(cls, size: int, *, ledger: Ledger | None = None) -> SequenceGroups:
        """Open the groups for ``size`` ranks per sequence, and return them. Collective over all ranks, once
        torch.distributed is initialised.

        ``ledger``: counts what the groups send until they join an engine; None for a new one. Raises `SequenceError` on
        every rank if ``size`` does not divide the world size, or is not the same on every rank.
        """
        world = dist.get_world_size()
        everybody = Control(open_group([list(range(world))], "gloo"))
        try:
            sizes = everybody.agree(Message("sequence groups", "size", 0, size))
        finally:
            everybody.close()
        if len(set(sizes)) > 1:
            raise SequenceError(f"sequence_parallel_size: expected the same on every rank, got {sizes} by rank")
        if not isinstance(size, int) or size < 1 or world % size:
            possible = [n for n in range(1, world + 1) if world % n == 0]
            raise SequenceError(
                f"sequence_parallel_size: expected a divisor of the world size {world}, one of {possible}, got {size}"
            )
        book = ledger if ledger is not None else Ledger()
        rows = [list(range(start, start + size)) for start in range(0, world, size)]
        columns = [list(range(place, world, size)) for place in range(size)]
        connections = Connections()
        with starting_together("SequenceGroups.open"), connections.recording():
            sequence = Group(open_group(rows), ledger=book)
            batches = Group(open_group(rows, "gloo"), ledger=book)
            control = Control(open_group(rows, "gloo"), ledger=book)
            data = open_group(columns)
        return cls(sequence, batches, control, data, (rows, columns), connections)

    @property
    def ledger(self) -> Ledger:
        """The ledger that counts what the groups send, by layer: their own, or that of the engine that they joined."""
        return self.sequence.ledger

    def join_engine(self, groups: EngineGroups) -> None:
        """Have the engine with these ``groups`` watch over this rank's exchanges and count them in its ledger;
        `zero_core.initialize` calls it.

        Where a rank fails, is stopped or makes no further call, the exchanges that its peers wait in then raise, with
        that cause. Does not communicate.
        """
        groups.cover((self.sequence, self.batches, self.control, self._data), self._connections)

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """Return torch's group of the ranks that share this rank's sequences. Raises ValueError after `close` if these
        are several."""
        return self.sequence.torch_group()

    def get_sequence_parallel_world_size(self) -> int:
        """Return the number of ranks that share a sequence."""
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        """Return this rank's index among the ranks that share its sequences."""
        return self.rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return torch's group of the ranks that hold the same shard of other samples. Raises ValueError after `close`
        if these are several."""
        return self._data.torch_group()

    def get_data_parallel_world_size(self) -> int:
        """Return the number of sequence groups, each of which computes samples of its own."""
        return self._data.world_size

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index in its data group, which is the number of its sequence group."""
        return self._data.rank

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return torch's group of all ranks, over which states are sharded and gradients averaged; None where
        torch.distributed is not initialised."""
        return dist.group.WORLD

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the number of all ranks: data times sequence."""
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this rank's number among all ranks."""
        return dist.get_rank()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return a group of this rank alone: every rank holds all weights of a layer."""
        return self._alone.torch_group()

    def get_model_parallel_world_size(self) -> int:
        """Return 1: every rank holds all weights of a layer."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Return 0: every rank holds all weights of a layer."""
        return 0

    def close(self) -> None:
        """Destroy this rank's process groups, including those that the `get_..._group` methods have returned.

        The default group stays open. Does not wait for other ranks: a peer that still waits on one of the groups gets
        an error. Further calls do nothing.
        """
        for group in (self.sequence, self.batches, self.control, self._data, self._alone):
            group.close()
