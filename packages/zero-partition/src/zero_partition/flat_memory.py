"""Who holds tensors in a unit's flat buffer: the unit, autograd, or anybody else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .host_facts import REFERENCES_OF_ONE, is_fake, storage_references


class FlatMemory:
    """The memory of one flat buffer, with the tensors in it that may find it empty.

    [Note: views that code keeps] Reading freed storage ends the process. The unit knows its own views, and autograd's,
    which are unpacked only after a gather; any further tensor or array in the memory is somebody's who may read it at
    any time. Then the memory is left to them, with the values of this pass, and the unit gets other memory.

    Attributes:
        saved: how many views of it autograd holds.
    """

    def __init__(self, flat: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        self.saved = 0
        self._flat = None if is_fake(flat) else flat
        self._own = REFERENCES_OF_ONE + len(views)

    @property
    def is_held(self) -> bool:
        """Return whether others hold the memory, or have held an array over it, so that torch does not resize it."""
        if self._flat is None:
            return False
        storage = self._flat.untyped_storage()
        return storage_references(storage._cdata) > self._own + self.saved or not storage.resizable()
