"""Weights that are borrowed by one thread and written by another."""

from __future__ import annotations

import torch

from .plans import Weights

__all__ = ["LentWeights"]


class LentWeights:
    """Weights of ``owner`` that the caller's thread borrows by `lend` and gives back by `give_back_lent`; in between an
    update has them as its `Weights`, on any thread.
    """

    def __init__(self, owner: Weights) -> None:
        self._owner = owner
        self._lent: dict[str, torch.Tensor] = {}

    def lend(self, name: str) -> torch.Tensor:
        """Borrow a shard's weights (1-D) from the owner, anew if they are borrowed already, as it may have copied them
        since; return them.
        """
        self.give_back_lent(name, dirty=False)
        self._lent[name] = self._owner.borrow(name, fresh=False)
        return self._lent[name]

    def give_back_lent(self, name: str, *, dirty: bool) -> None:
        """Give a shard back to the owner if it is borrowed; ``dirty``: it was written."""
        if name in self._lent:
            self._owner.give_back(name, dirty=dirty)
            del self._lent[name]

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """Return the weights of a shard that is lent; ``fresh`` changes nothing."""
        return self._lent[name]

    def give_back(self, name: str, *, dirty: bool) -> None:
        """Do nothing: the caller's thread gives the shard back."""
