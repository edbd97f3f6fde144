"""The state of a rank that its watch reads while it trains, and that travels with its messages."""

from __future__ import annotations


class Watched:
    """Where a rank's main thread is. Setting attributes is the only cost of the watch to training.

    Attributes:
        waiting: (what this rank waits for, since when by `time.monotonic`, whether it is a message and not data; a
            message arrives at once when it was sent); None while it does not wait.
        last: the last call that all ranks took part in.
        micro_batches: number of micro-batches that this rank has counted.
        request: what this rank wants all ranks to do, as a number that goes with every message; the highest is agreed
            on.
        agreed: the highest request of any rank so far; after the same call, equal on every rank.
        announced: bits that go with every message.
        heard: the bits that any rank announced with the last call; after the same call, equal on every rank.
        failed: (why a call of this rank failed, when); None once another call began.
        owes_backward: this rank's last forward pass is done, and no backward pass has begun since.
        excused: the `id` of each exception that this rank was handling when it began its latest call.
    """

    def __init__(self) -> None:
        self.waiting: tuple[object, float, bool] | None = None
        self.last: object = "none"
        self.micro_batches = 0
        self.request = 0
        self.agreed = 0
        self.announced = 0
        self.heard = 0
        self.failed: tuple[str, float] | None = None
        self.owes_backward = False
        self.excused: frozenset[int] = frozenset()
