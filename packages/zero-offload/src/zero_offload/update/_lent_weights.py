"""Weights that are borrowed by one thread and written by another."""

from __future__ import annotations

import torch

from .plans import Weights

__all__ = ["LentWeights"]


class LentWeights:
    """The weights of ``owner``, for an update that runs on another thread: the caller's thread borrows shards from the
    owner by `lend` and gives them back by `give_back_lent`; in between the update has them, by `borrow` and
    `give_back`, as its `Weights`.
    """

    def __init__(self, owner: Weights) -> None:
        self._owner = owner
        self._lent: dict[str, torch.Tensor] = {}

    def lend(self, name: str) -> torch.Tensor:
        """Borrow a shard's weights (1-D) from the owner and return them. Shards that are borrowed already are given
        back and borrowed anew, as the owner may have copied them since.
        """
        self.give_back_lent(name, dirty=False)
        self._lent[name] = self._owner.borrow(name, fresh=False)
        return self._lent[name]

    def give_back_lent(self, name: str, *, dirty: bool) -> None:
        """Give a shard back to the owner; do nothing if it is not borrowed. ``dirty``: its weights were written."""
        if name in self._lent:
            self._owner.give_back(name, dirty=dirty)
            del self._lent[name]

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """Return the weights (1-D) of a shard that is lent; ``fresh`` changes nothing."""
        return self._lent[name]

    def give_back(self, name: str, *, dirty: bool) -> None:
        """Do nothing: the caller's thread gives the shard back to its owner."""
