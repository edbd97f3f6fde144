"""The fixed binary tree along which one rank adds the virtual ranks' gradients."""

from __future__ import annotations

import torch


class LeafTree:
    """Adds up the gradients of one step's micro-batches along a binary tree.

    [Note: virtual ranks] A step has V virtual ranks, a power of two, and N ranks compute them, N a power of two that
    divides V. Rank r's micro-batch j is virtual rank j N + r. So a reduction over the ranks, summed along a tree
    (`zero_comm.TreeSum`), is the node of the tree over all V leaves that covers leaves j N to (j + 1) N - 1, and the
    nodes of successive micro-batches are added here, neighbours first. The result does not depend on N, to the bit:
    leaves are sent as autograd made them, every sum is one of the tree's nodes, in the accumulate dtype, and the mean
    is taken once, at the root. Only shards are kept, log2(V / N) of them at most.

    ``count``: number of reductions in a step, V / N. ``divisor``: V, by which the sum at the root is divided.
    """

    def __init__(self, count: int, divisor: int) -> None:
        self.count = count
        self._divisor = divisor
        self._nodes: list[tuple[int, torch.Tensor]] = []
        self._added = 0

    @property
    def added(self) -> int:
        """Return how many micro-batches were added since the tree was made or `clear` was called."""
        return self._added

    def neighbour(self) -> torch.Tensor | None:
        """Return the partial sum to which the reduction of the next micro-batch may be added in place, which saves
        `add` the sum: that of the last one, if both are neighbours in the tree. Else None."""
        return self._nodes[-1][1] if self._nodes and self._nodes[-1][0] == 1 else None

    def add(self, node: torch.Tensor) -> torch.Tensor | None:
        """Add the reduction of the next micro-batch. Return the mean over all leaves after the step's last one, else
        None. Call `clear` before the next step's first.

        ``node``: the reduction (1-D), which the tree keeps and overwrites; or the tensor of `neighbour`, to which the
        caller has added it. The mean is in the memory of one of the nodes, which the tree lets go.
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

    def new_empty(self) -> LeafTree:
        """Return a new tree with the same ``count`` and ``divisor``, and nothing added."""
        return LeafTree(self.count, self._divisor)

    def tensors(self) -> list[torch.Tensor]:
        """Return the partial sums that the tree holds now."""
        return [node for _, node in self._nodes]

    def clear(self) -> None:
        """Forget everything that was added."""
        self._nodes.clear()
        self._added = 0
