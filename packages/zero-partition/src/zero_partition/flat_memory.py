"""Find whether code other than the unit and autograd holds tensors in a unit's flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .host_facts import REFERENCES_OF_ONE, is_fake, storage_references

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

    @property
    def is_held(self) -> bool:
        """Return whether code other than the unit and autograd holds a tensor in the memory, or an array, because of
        which torch refuses to resize the memory. False for a fake tensor."""
        if self._flat is None:
            return False
        # no storage object is held while references are counted: in torch 2.8 it is one
        references = storage_references(self._flat.untyped_storage()._cdata)
        return references > self._own + self.saved or not self._flat.untyped_storage().resizable()
