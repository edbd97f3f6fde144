"""One unit's reductions of a step, done a second time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from zero_partition import UnitGradients

from .digests import same_bits


class RepeatedReductions:
    """Sends what one unit's reductions have sent once more, and compares the averages, after each backward pass.

    What lies between a rank's own gradient and the shard that the optimizer reads is the wire and a sum. Both are
    repeated from a copy that was taken before the first went out.
    """

    def __init__(self, gradients: UnitGradients, rank: int) -> None:
        self.differences: list[str] = []
        self._gradients = gradients
        self._rank = rank
        self._tree = None if gradients.leaves is None else gradients.leaves.empty()

    @contextmanager
    def backward(self, step: int) -> Iterator[None]:
        """A context around a backward pass; compares behind it. Collective."""
        gradients = self._gradients
        average = self._present() if self._tree is None and gradients.is_reduced else None
        sent: list[torch.Tensor] = []

        def keep(flat: torch.Tensor, _present: Sequence[bool]) -> None:
            sent.append(flat.clone())

        gradients.watches.append(keep)
        try:
            yield
        finally:
            gradients.watches.remove(keep)
        for flat in sent:
            if self._tree is None:
                average = gradients.reduce_again(flat, average, step)
            else:
                average = self._tree.add(gradients.reduce_again(flat, None, step))
        if sent and average is not None:
            self._compare(average)

    def _present(self) -> torch.Tensor:
        with self._gradients.averaged() as averaged:
            return averaged.clone()

    def _compare(self, again: torch.Tensor) -> None:
        layout = self._gradients.unit.layout
        with self._gradients.averaged() as averaged:
            if averaged.numel() == layout.numel:
                places = [(entry.name, entry.offset, entry.end) for entry in layout.entries]
            else:
                places = [
                    (fragment.entry.name, fragment.shard_offset, fragment.shard_offset + fragment.length)
                    for fragment in layout.fragments(self._rank)
                ]
            for name, start, end in places:
                if not same_bits(averaged[start:end], again[start:end].to(averaged.device)):
                    self.differences.append(name)
