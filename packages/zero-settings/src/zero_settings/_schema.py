"""The JSON Schema of a configuration file, in which every key says what it does."""

from __future__ import annotations

from typing import Any

from zero_settings._base import Section
from zero_settings._prepare import SCHEMA_KEY
from zero_settings.features import NO_EFFECT, REFUSED
from zero_settings.keys import ConfigFile


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file as a dict. It allows aliases, "auto" and the key "$schema"."""
    schema = ConfigFile.model_json_schema()
    _describe(schema, schema["properties"], ConfigFile, "")
    schema["properties"][SCHEMA_KEY] = {"type": "string", "description": "Where an editor finds this schema."}
    return schema


def _describe(schema: dict[str, Any], properties: dict[str, Any], section: type[Section], path: str) -> None:
    """Set the descriptions of the keys of ``section``, and of the sections inside it, in place.

    ``schema``: the schema of the file, whose ``$defs`` has the inner sections; ``properties``: the schemas of the keys
    of ``section``; ``path``: of the section, with a dot at the end, or empty."""
    for key, field in section.model_fields.items():
        inner = section.section_of(key, {})
        said = field.description or _verdict(f"{path}{key}") or (_summary(inner) if inner is not None else "")
        for name in (key, *(alias for alias, of in section.aliases.items() if of == key)):
            if said and name in properties:
                properties[name] = {**properties[name], "description": said}
        if inner is not None:
            within = schema["$defs"].get(inner.__name__, {}).get("properties", {})
            _describe(schema, within, inner, f"{path}{key}.")


def _verdict(path: str) -> str:
    """Return a sentence on why the key at ``path``, or a section that contains it, has no effect or is not available;
    empty if it works."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in NO_EFFECT:
            return f"No effect: {NO_EFFECT[prefix]}."
        for row in REFUSED:
            if row.path in (prefix, f"{prefix}.enabled"):
                return f"Not available ({row.feature}): {row.instead}."
    return ""


def _summary(section: type[Section]) -> str:
    """Return the first paragraph of a section's docstring in one line."""
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())
