"""Machine files: TOML in which every value has a source; presets and overrides."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .errors import PlanError, nearest
from .quantities import EXAMPLES, format_quantity, parse_quantity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KEYS: dict[str, tuple[str, str]] = {
    "device.memory": ("bytes", "memory of one accelerator"),
    "device.memory_bandwidth": ("bytes/s", "between an accelerator and its memory"),
    "device.fp32": ("FLOP/s", "dense matrix products of one accelerator"),
    "device.tf32": ("FLOP/s", "the same, float32 values rounded to tf32"),
    "device.fp16": ("FLOP/s", "the same"),
    "device.bf16": ("FLOP/s", "the same"),
    "device.fp8": ("FLOP/s", "the same"),
    "device.attention_fp32": ("FLOP/s", "fused attention of one accelerator; as matrix products if it is not given"),
    "device.attention_fp16": ("FLOP/s", "the same"),
    "device.attention_bf16": ("FLOP/s", "the same"),
    "node.devices": ("count", "accelerators, and ranks, of a node"),
    "node.link": ("bytes/s", "what one accelerator sends to the others of its node"),
    "node.host_memory": ("bytes", "main memory of a node"),
    "node.host_memory_bandwidth": ("bytes/s", "of a node"),
    "node.device_to_host": ("bytes/s", "of one accelerator"),
    "node.host_to_device": ("bytes/s", "of one accelerator"),
    "network.per_node": ("bytes/s", "what one node sends to the others"),
    "disk.capacity": ("bytes", "of a node's drives together"),
    "disk.read": ("bytes/s", "of a node's drives together"),
    "disk.write": ("bytes/s", "of a node's drives together"),
    "disk.read_and_write": ("bytes/s", "of both together, while the drives read and write at the same time"),
    "disk.endurance": ("bytes", "rated writes to a node's drives together (TBW)"),
}
"""Every key of a machine file -> its unit and its meaning."""
REQUIRED = ("device.memory", "node.devices")
"""Keys that every machine file must give."""


@dataclass(frozen=True)
class Value:
    """One value of a machine.

    ``number``: in bytes, bytes/s, FLOP/s or a count. ``text``: as written in the file. ``source``: where it comes from.
    """

    number: float
    text: str
    source: str


@dataclass(frozen=True)
class Machine:
    """Accelerators, nodes, network and drives. ``values``: by the keys of `KEYS`; unknown values are absent."""

    name: str
    values: Mapping[str, Value]

    def get(self, key: str) -> float | None:
        """Return the value of ``key`` in the unit of `KEYS`; None if the machine does not give it or there is no such
        key.
        """
        found = self.values.get(key)
        return None if found is None else found.number

    def need(self, key: str) -> float:
        """Return the value of ``key`` in the unit of `KEYS`. Raises `PlanError` if the machine does not give it."""
        found = self.get(key)
        if found is None:
            unit, what = KEYS[key]
            raise PlanError(
                f"{self.name}: {key} is missing ({what}); give it in the file or with --set '{key}={EXAMPLES[unit]}'"
            )
        return found

    def with_values(self, overrides: Mapping[str, object], source: str = "given") -> Machine:
        """Return a copy in which the values of ``overrides``, by key, replace or complete the present ones; ``source``:
        where they come from. Raises `PlanError` for an unknown key and a value that cannot be read.
        """
        changed = {key: _parse_value(key, value, source, self.name) for key, value in overrides.items()}
        return Machine(self.name, {**self.values, **changed})

    def rows(self) -> Iterator[tuple[str, Value]]:
        """Yield (key, value) of the values that the machine gives, in the order of `KEYS`."""
        for key in KEYS:
            if key in self.values:
                yield key, self.values[key]

    def as_toml(self) -> str:
        """Return the text of a machine file with these values."""
        lines = [f"name = {_toml_string(self.name)}"]
        section = ""
        for key, value in self.rows():
            head, _, tail = key.partition(".")
            if head != section:
                lines += ["", f"[{head}]"]
                section = head
            lines.append(f"{tail} = {{ value = {_toml_string(value.text)}, source = {_toml_string(value.source)} }}")
        return "\n".join(lines) + "\n"


def presets() -> tuple[str, ...]:
    """Return the names of the machines that come with this package."""
    folder = resources.files("zero_plan") / "presets"
    names = [item.name for item in folder.iterdir()]
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_machine(name: str) -> Machine:
    """Return a preset by name, or the machine of a TOML file.

    Raises `PlanError` for an unknown preset with the nearest name, an unreadable file, an unknown key, a bad unit, and
    a missing value of `REQUIRED`.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{name}: cannot be read: {error}") from error
        return parse_machine(text, name)
    if name not in presets():
        raise PlanError(
            f"no machine {name!r}: expected a .toml file or one of {', '.join(presets())}{nearest(name, presets())}"
        )
    found = resources.files("zero_plan") / "presets" / f"{name}.toml"
    return parse_machine(found.read_text(encoding="utf-8"), name)


def parse_machine(text: str, origin: str) -> Machine:
    """Return the machine that a TOML text describes; ``origin`` names it in errors and is the source of values without
    one.

    A value is `memory = "80 GB"`, or `memory = { value = "80 GB", source = "…" }`, in the sections device, node,
    network and disk. Raises `PlanError` for invalid TOML, an unknown section or key, a bad unit, and a missing value of
    `REQUIRED`.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{origin}: not valid TOML: {error}") from error
    name = document.pop("name", origin)
    if not isinstance(name, str):
        raise PlanError(f"{origin}: name: expected text, got {name!r}")
    values = {key: _parse_value(key, value, origin, origin) for key, value in _flat_values(document, origin)}
    machine = Machine(name, values)
    for key in REQUIRED:
        machine.need(key)
    return machine


def _flat_values(document: Mapping[str, Any], origin: str) -> Iterator[tuple[str, object]]:
    """Yield ("section.key", value) for every value of a machine file's TOML document. Raises `PlanError`, naming
    ``origin``, for an unknown section.
    """
    sections = sorted({key.partition(".")[0] for key in KEYS})
    for section, content in document.items():
        if section not in sections or not isinstance(content, dict):
            known = ", ".join(sections)
            raise PlanError(
                f"{origin}: expected sections {known} and a name, got {section!r}{nearest(section, sections)}"
            )
        for key, value in content.items():
            yield f"{section}.{key}", value


def _parse_value(key: str, value: object, source: str, origin: str) -> Value:
    """Return the value that a machine file gives for ``key``: text or a number, or a table of value and source.

    ``source``: of a value without one. Raises `PlanError`, naming ``origin``, for an unknown key or a value that cannot
    be read.
    """
    if key not in KEYS:
        raise PlanError(f"{origin}: no key {key!r}{nearest(key, KEYS)}; keys: {', '.join(KEYS)}")
    if isinstance(value, dict):
        extra = set(value) - {"value", "source"}
        if extra or "value" not in value:
            got = ", ".join(map(str, value)) or "nothing"
            raise PlanError(f"{origin}: {key}: expected {{ value, source }}, got {got}")
        source = str(value.get("source", source))
        value = value["value"]
    number = parse_quantity(value, KEYS[key][0], f"{origin}: {key}")
    return Value(number, str(value), source)


def measured_value(number: float, key: str, source: str) -> dict[str, object]:
    """Return ``number``, which was measured in the unit of ``key``, as a value of a machine file: a table of text, with
    three digits, and ``source``.
    """
    unit = KEYS[key][0]
    text = {"count": f"{number:.0f}", "bytes": format_quantity(number, "B"), "bytes/s": format_quantity(number, "B/s")}
    return {"value": text.get(unit) or format_quantity(number, "FLOP/s"), "source": source}


def _toml_string(text: str) -> str:
    """Return ``text`` as a quoted TOML string; newlines become spaces."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'
