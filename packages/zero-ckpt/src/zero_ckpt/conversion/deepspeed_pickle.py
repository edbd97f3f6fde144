"""Pickles that name DeepSpeed's classes, which are not imported.

Only for writing: reading goes through `torch_file`, which resolves none of these names. Classes here have attributes of
the same names as DeepSpeed's.
"""

from __future__ import annotations

from pickle import GLOBAL
from pickle import _Pickler as PythonPickler  # type: ignore[attr-defined, unused-ignore]
from typing import Any


class DeepSpeedObject:
    """An object whose pickle says that it is of the class `place` (module, name) of DeepSpeed, with these
    attributes."""

    place: tuple[str, str]

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class DynamicScaler(DeepSpeedObject):
    """A dynamic loss scale."""

    place = "deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"


class ConstantScaler(DeepSpeedObject):
    """A constant loss scale."""

    place = "deepspeed.runtime.fp16.loss_scaler", "LossScaler"


class FragmentAddress(DeepSpeedObject):
    """Elements of a parameter in a partition: `numel` from `start` on."""

    place = "deepspeed.utils.tensor_fragment", "fragment_address"


class NamingPickler(PythonPickler):  # type: ignore[misc, unused-ignore]
    """A pickler that writes a subclass of `DeepSpeedObject` as the class that it stands for.

    The pickler in C looks a class up by its name before it writes it.
    """

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write a class or function as its name: for a subclass of `DeepSpeedObject` its `place`, for others `name` or
        the one that they have."""
        if isinstance(obj, type) and issubclass(obj, DeepSpeedObject):
            self.write(GLOBAL + "\n".join((*obj.place, "")).encode())  # type: ignore[attr-defined, unused-ignore]
            self.memoize(obj)  # type: ignore[attr-defined, unused-ignore]
        else:
            super().save_global(obj, name)  # type: ignore[misc, unused-ignore]


class Pickling:
    """The namespace that `torch.save` gets as its ``pickle_module``."""

    Pickler = NamingPickler
