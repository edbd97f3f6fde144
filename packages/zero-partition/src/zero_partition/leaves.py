"""The fixed binary tree over the virtual ranks' gradients, as one rank walks it."""

from __future__ import annotations

import torch


class LeafTree:
    """Adds up the gradients of one step's micro-batches along a binary tree.

    [Note: virtual ranks] V virtual ranks, a power of two, share one step; N ranks compute them, N a power of two that
    divides V. Rank r's micro-batch j is virtual rank j N + r. So a reduction over the ranks, summed along a tree
    (`zero_comm.TreeSum`), is the node of the tree over all V leaves that covers leaves j N to (j + 1) N - 1, and the
    nodes of successive micro-batches are added here, neighbours first. Which ranks computed the leaves changes no bit:
    leaves travel as autograd made them, every sum is one of the tree's nodes, in the accumulate dtype, and the mean is
    taken once, at the root. Only shards are kept: log2(V / N) of them at most.

    ``count``: the reductions of a step, V / N. ``divisor``: V.
    """

    def __init__(self, count: int, divisor: int) -> None:
        self.count = count
        self._divisor = divisor
        self._nodes: list[tuple[int, torch.Tensor]] = []
        self._added = 0

    @property
    def added(self) -> int:
        """Micro-batches added since `clear`."""
        return self._added

    def neighbour(self) -> torch.Tensor | None:
        """Return the sum that the reduction of the next micro-batch may be added to where it arrives, instead of `add`
        doing so; None where it has no neighbour yet."""
        return self._nodes[-1][1] if self._nodes and self._nodes[-1][0] == 1 else None

    def add(self, node: torch.Tensor) -> torch.Tensor | None:
        """Add the reduction of the next micro-batch; return the mean over all leaves once the last one is there.

        ``node`` belongs to the tree from now on, and is overwritten. It is `neighbour` where the reduction was added
        to that already.
        """
        size = 1
        if node is self.neighbour():
            self._nodes.pop()
            size = 2
        while self._nodes and self._nodes[-1][0] == size:
            _, left = self._nodes.pop()
            node = left.add_(node)
            size *= 2
        self._nodes.append((size, node))
        self._added += 1
        if self._added < self.count:
            return None
        self._nodes.clear()
        return node.div_(self._divisor)

    def empty(self) -> LeafTree:
        """A tree of the same shape without anything in it."""
        return LeafTree(self.count, self._divisor)

    def tensors(self) -> list[torch.Tensor]:
        """The sums held now."""
        return [node for _, node in self._nodes]

    def clear(self) -> None:
        """Forget what was added."""
        self._nodes.clear()
        self._added = 0
