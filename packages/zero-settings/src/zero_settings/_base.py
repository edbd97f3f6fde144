"""The base of all sections: strict number types, and how aliases, "auto" and null are declared.

A section is one JSON object of the configuration. The functions named as pydantic validators run on a value as it was
written; what they return is validated or stored in its place."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    Strict,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import CoreSchema

ALL_KEYS: frozenset[str] = frozenset({"*"})
"""A value for `Section.auto_keys`: every key of the section may be "auto"."""


LARGEST_INTEGER = 2**63 - 1


def _to_integer(value: Any) -> Any:
    """Return ``value`` as an int if it is an integer or another real number without a fraction, such as 2.0.

    A pydantic validator: raises PydanticCustomError for anything else, booleans included, and beyond 64 bits."""
    integral = isinstance(value, Integral) or (isinstance(value, Real) and float(value).is_integer())
    if isinstance(value, bool) or not integral:
        raise PydanticCustomError("integer", "an integer")
    if abs(value) > LARGEST_INTEGER:
        raise PydanticCustomError("integer", "an integer of at most 64 bits")
    return int(value)


def _to_number(value: Any) -> Any:
    """Return a real number, infinities included, as a float.

    A pydantic validator: raises PydanticCustomError for anything else, booleans and NaN included.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
            raise PydanticCustomError("number", "a number")
        return float(value)
    except OverflowError:
        raise PydanticCustomError("number", "a number of at most 1.8e308") from None


def _to_finite(value: Any) -> Any:
    """Return a finite real number as a float.

    A pydantic validator: raises PydanticCustomError for anything else.
    """
    number = _to_number(value)
    if math.isinf(number):
        raise PydanticCustomError("number", "a finite number")
    return number


Flag = Annotated[bool, Strict()]
Int = Annotated[int, BeforeValidator(_to_integer)]
PositiveInt = Annotated[int, Field(gt=0), BeforeValidator(_to_integer)]
NaturalInt = Annotated[int, Field(ge=0), BeforeValidator(_to_integer)]
Float = Annotated[float, BeforeValidator(_to_finite)]
FloatOrInf = Annotated[float, BeforeValidator(_to_number)]
NaturalFloat = Annotated[float, Field(ge=0), BeforeValidator(_to_finite)]
PositiveFloat = Annotated[float, Field(gt=0), BeforeValidator(_to_finite)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(_to_finite)]
Text = Annotated[str, Strict()]


class FrozenMap(Mapping[str, Any]):
    """An immutable mapping of plain data. The constructor copies ``items`` and freezes the values at every depth (see
    `freeze`), so later changes of them have no effect."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = {key: freeze(value) for key, value in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


def freeze(value: Any) -> Any:
    """Return a copy of plain data in which lists are tuples and mappings are `FrozenMap`s, at every depth. Other values
    are returned as they are."""
    if isinstance(value, Mapping):
        return FrozenMap(value)
    return tuple(map(freeze, value)) if isinstance(value, (list, tuple)) else value


def thaw(value: Any) -> Any:
    """Return a copy of ``value`` in which mappings are dicts, and tuples and lists are lists, at every depth: the
    inverse of `freeze`. Other values are returned as they are."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    return [thaw(item) for item in value] if isinstance(value, (list, tuple)) else value


FreeForm = Annotated[Mapping[str, Any], AfterValidator(freeze), PlainSerializer(thaw)]
"""An object with any keys: the settings of a feature that is not available, refused unless it is switched off."""


def no_keys() -> FrozenMap:
    """Return an empty frozen object: the default of a key whose value is an object with any keys (`FreeForm`)."""
    return FrozenMap({})


class Section(BaseModel):
    """One JSON object of the configuration: its fields are the keys, with type, default and description. It is
    immutable, and unknown keys are refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names of keys that may be written, older or shorter -> the key."""

    auto_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys whose value may be "auto"."""

    @classmethod
    def accepts_auto(cls, key: str) -> bool:
        """Return whether "auto" may be written as the value of `key` (no alias). It then stands for the default or for
        a value derived from others."""
        return key in cls.model_fields and (cls.auto_keys is ALL_KEYS or key in cls.auto_keys)

    @classmethod
    def section_of(cls, key: str, siblings: Mapping[str, Any]) -> type[Section] | None:
        """Return the section class that the value of `key` (no alias) is read as; None if it is read as a plain value
        or there is no such key.

        `siblings`: the object that contains `key`, with the keys and values as written. Subclasses may choose the class
        by them."""
        return cls._child_sections().get(key)

    @classmethod
    @functools.cache
    def _child_sections(cls) -> dict[str, type[Section] | None]:
        """Return, for each key of this section, the section class that its value is read as, or None for a plain value.
        Cached per class."""
        return {key: _section_in(field.annotation) for key, field in cls.model_fields.items()}

    @classmethod
    def written_keys(cls) -> list[str]:
        """Return every key that may be written in this section: first the keys themselves, then their aliases."""
        return [*cls.model_fields, *cls.aliases]

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON Schema that pydantic makes of the section, with "auto" allowed where a key accepts it and the
        aliases added as keys. Called by pydantic."""
        described = handler.resolve_ref_schema(handler(schema))
        properties = described.get("properties", {})
        for key in properties:
            if cls.accepts_auto(key):
                properties[key] = {"anyOf": [properties[key], {"const": "auto"}]}
        properties.update({alias: properties[key] for alias, key in cls.aliases.items()})
        return described


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the first `Section` class that a type annotation names, also within a union or Annotated; None if there is
    none."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType, Annotated):
        return next(filter(None, map(_section_in, get_args(annotation))), None)
    if origin is None and isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return None


def plain_kind(annotation: Any) -> type | None:
    """Return the one plain type that values of a key with this type annotation have, null aside: bool, int, float, or
    tuple for a tuple of strings. None for an annotation that allows other types or several."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return plain_kind(arguments[0])
    if origin in (Union, types.UnionType):
        kinds = {plain_kind(argument) for argument in arguments if argument is not types.NoneType}
        return kinds.pop() if len(kinds) == 1 else None
    if origin is tuple:
        return tuple if plain_kind(arguments[0]) is None and str in (arguments[0], *get_args(arguments[0])) else None
    return annotation if annotation in (bool, int, float) else None


def lowered(value: Any) -> Any:
    """Return a string in lower case, and anything else as it is. A pydantic validator."""
    return value.lower() if isinstance(value, str) else value


def null_is_default(value: Any) -> Any:
    """Return an empty dict for None, so that null means a section of defaults; anything else as it is. A pydantic
    validator."""
    return {} if value is None else value
