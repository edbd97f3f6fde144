"""`Delegated`: a descriptor for attributes that another object holds."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

from typing_extensions import Self

T = TypeVar("T")


class Delegated(Generic[T]):
    """An attribute that is read from and written to another object, the holder. ``holder``: the path to it, as in
    ``"state.counters"``. ``name``: the attribute's name there, by default the same."""

    def __init__(self, holder: str, name: str | None = None) -> None:
        self._holder = attrgetter(holder)
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        """Return the attribute of the holder; this descriptor if it is read from the class."""
        return self if instance is None else getattr(self._holder(instance), str(self._name))

    def __set__(self, instance: object, value: T) -> None:
        """Set the attribute of the holder."""
        setattr(self._holder(instance), str(self._name), value)
