"""Track the storages that are alive, by the operations that made them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """While active, counts the bytes of the storages that operations make and that are alive.

    ``of``: counts a storage for a tensor for which it returns True; all by default.

    Attributes:
        live, peak: bytes now, and the most so far.
        largest: bytes of the largest storage so far.
    """

    def __init__(self, of: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._of = of
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage()._cdata not in given and self._of(leaf):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, nbytes)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes
