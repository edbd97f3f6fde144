"""A rank's signs of life while it trains, for the watch beside it to read."""

from __future__ import annotations


class Watched:
    """Where a rank's main thread is; setting an attribute is all that training pays for the watch.

    Attributes:
        waiting: what this rank waits for, since when (`time.monotonic`), and whether it is a message, which arrives at
            once when it was sent, rather than data; None while it does not wait.
        last: the last call that all ranks took part in.
        micro_batches: how many this rank has counted.
        wish: what this rank wants all ranks to do, a number that goes with every message; the highest counts.
        agreed: the highest wish so far of any rank. After the same call it is the same on every rank.
        announced: bits that go with every message.
        heard: the bits that any rank announced with the last call. After the same call they are the same on every rank.
        failed: why a call of this rank failed, and when; None once another began.
        excused: the `id` of the exception in whose handler this rank began its latest call.
    """

    def __init__(self) -> None:
        self.waiting: tuple[object, float, bool] | None = None
        self.last: object = "none"
        self.micro_batches = 0
        self.wish = 0
        self.agreed = 0
        self.announced = 0
        self.heard = 0
        self.failed: tuple[str, float] | None = None
        self.excused = id(None)
