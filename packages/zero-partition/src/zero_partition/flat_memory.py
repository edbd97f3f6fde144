"""Find whether code other than the unit and autograd holds tensors in a unit's flat buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .host_facts import (
    OBJECT_REFERENCES_OF_ONE,
    REFERENCES_OF_ONE,
    is_fake,
    object_references,
    storage_references,
)
from .unit_edits import without_torch_function

_LEFT = "_zero_left"  # attribute of the storage of a flat buffer whose engine is closed


def leave_memory(flat: torch.Tensor) -> None:
    """Mark the memory of ``flat``, a flat buffer whose engine is being closed, as left to the parameters, for
    `is_left_memory`."""
    setattr(flat.untyped_storage(), _LEFT, True)


def is_left_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is in memory that a closed engine has left to its parameters (`leave_memory`); other
    objects of that engine may have tensors in it."""
    return hasattr(tensor.untyped_storage(), _LEFT)


class FlatMemory:
    """Counts the tensors in the memory of one flat buffer, to tell whether it can be freed.

    [Note: views that code keeps] Reading freed storage is a segmentation fault. The unit knows its own views, and
    autograd's, which are unpacked only after a gather. Any other tensor or array in the memory may be read by user code
    at any time. Then release leaves the memory to that code, with the values of this pass, and the unit gets a new flat
    buffer.

    ``flat``: the flat buffer. ``views``: the unit's own views of it, which do not count.

    Attributes:
        saved: number of views of the flat buffer that autograd holds.
    """

    def __init__(self, flat: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        self.saved = 0
        self._flat = None if is_fake(flat) else flat
        self._own = REFERENCES_OF_ONE + len(views)
        self._residents = 0

    @property
    def is_held(self) -> bool:
        """Return whether code other than the unit and autograd holds a tensor in the memory, or an array, because of
        which torch refuses to resize the memory. False for a fake tensor."""
        if self._flat is None:
            return False
        return self._count() > self._own + self.saved or not self._flat.untyped_storage().resizable()

    @without_torch_function
    def note_residents(self, others: Iterable[torch.Tensor]) -> None:
        """Note those of ``others``, the engine's own tensors, that lie in the memory, where they stay, for
        `is_private`."""
        if self._flat is not None:
            storage = self._flat.untyped_storage()._cdata
            self._residents += sum(other.untyped_storage()._cdata == storage for other in others)

    def is_private(self, lent: int) -> bool:
        """Return whether nobody but the engine holds a tensor or an array in the memory: there are no more than the
        unit's views, those that `note_residents` was told of, and ``lent`` ones. False for a fake tensor."""
        if self._flat is None or self._count() > self._own + self._residents + lent:
            return False
        return object_references(self._flat) <= OBJECT_REFERENCES_OF_ONE

    def _count(self) -> int:
        """Return the number of references to the memory."""
        assert self._flat is not None
        # no storage object is held while references are counted: in torch 2.8 it is one
        return storage_references(self._flat.untyped_storage()._cdata)
