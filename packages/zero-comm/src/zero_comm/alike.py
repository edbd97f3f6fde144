"""Control messages in a world of which only one rank exists: torch's fake process group.

[Note: a fake world] `torch.distributed.init_process_group("fake", …)` gives one process the rank of its choice in a
world of any size; its collectives send nothing. There every group of ours is fake too, and what a rank hears of the
others is what it says itself: that they are alike. The ledger counts as in a real world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from .control import Control, Message
from .ledger import Ledger
from .tag import Tag
from .topology import Topology


def in_fake_world() -> bool:
    """Return whether this process is alone and the other ranks are torch's fake process group."""
    return bool(dist.get_backend() == "fake")


class AlikeControl(Control):
    """`Control` whose other ranks say what this one says.

    ``nodes``: the node of each rank.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, *, ledger: Ledger | None = None, nodes: Sequence[str] = ()
    ) -> None:
        super().__init__(process_group, ledger=ledger)
        self._nodes = tuple(nodes)

    def place(self, node: str) -> None:
        """Take the ranks to be on the nodes given."""
        super().place(node)
        self.topology = Topology(self._nodes)

    def watch(self, sever: Callable[[], object], stopped_after: float) -> None:
        """Nothing to do: nobody is waited for."""

    def _all_gather(self, body: bytes, tag: Tag, doing: Message, patience: timedelta | None) -> list[bytes]:
        self._count(tag, len(body))
        return [body] * self.world_size
