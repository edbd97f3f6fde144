"""From the user's dict to canonical keys: removed and deprecated keys, aliases, unknown keys, "auto"."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_settings._base import Section
from zero_settings.errors import ConfigError, Problem, show
from zero_settings.keys import ConfigFile

REMOVED_KEYS = {
    "amp": 'use "fp16", "bf16" or "torch_autocast"',
    "compression_training": "compress the exported weights with torchao after training",
    "curriculum_learning": 'use "data_efficiency.data_sampling.curriculum_learning"',
    "eigenvalue": "it only served quantize_training, which is gone too; remove it",
    "elasticity": 'use "elastic.batch_size" with "zero-launch --elastic MIN:MAX"; checkpoints load at any world size',
    "graph_harvesting": "use torch.cuda.make_graphed_callables in the model",
    "nebula": 'set "checkpoint.writer.decoupled": true to write checkpoints while training continues',
    "progressive_layer_drop": "drop layers in the model's own forward",
    "quantize_training": "use torchao's quantisation-aware training",
    "sparse_attention": "use torch.nn.attention.flex_attention in the model",
    "sparse_gradients": "remove it: sparse gradients travel as dense ones",
    "zero_optimization.zeropp_loco_param": 'use "zero_optimization.zero_quantized_gradients"',
}
"""Keys of older configurations: refused whatever their value, each with what to do instead."""

SCHEMA_KEY = "$schema"
"""The key by which editors find the JSON Schema of a file; it configures nothing."""

_CPU_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


@dataclass
class PreparedSource:
    """The configuration under canonical keys, and how the user wrote it.

    Canonical is a key's name in `ConfigFile`, as opposed to its aliases; a canonical path has such names, with dots
    between.
    """

    data: dict[str, Any] = field(default_factory=dict)
    """The values, nested as in the file; those that were "auto" are left out, or None for a required key."""
    written: dict[str, str] = field(default_factory=dict)
    """Canonical path of every key that the user gave -> the path as it was written."""
    auto: set[str] = field(default_factory=set)
    """Canonical paths whose value was "auto"."""
    dialect: set[str] = field(default_factory=set)
    """Canonical paths that the user did not give and whose default is another one in this dialect."""
    notes: dict[str, str] = field(default_factory=dict)
    """Canonical path -> a remark for the report, such as "written as ..."."""
    problems: list[Problem] = field(default_factory=list)

    def as_written(self, path: str) -> str:
        """Return a canonical path in the names that the user wrote. Keys that the user did not write keep their
        canonical names."""
        head, tail = path, ""
        while head and head not in self.written:
            cut = max(head.rfind("."), head.rfind("["))
            head, tail = head[: max(cut, 0)], head[max(cut, 0) :] + tail
        return self.written.get(head, "") + tail


def prepare(raw: dict[str, Any], defaults: Mapping[str, tuple[Any, str]]) -> PreparedSource:
    """Return the configuration ``raw``, as it was read, under canonical keys. ``raw`` is not changed.

    ``defaults``: canonical path -> (value, reason), used for keys that the user did not give. Raises `ConfigError` with
    all unknown, removed and repeated keys."""
    prepared = PreparedSource()
    _refuse_removed(raw, prepared)
    prepared.data = _canonical(_modernised(raw, prepared), ConfigFile, "", "", prepared)
    if prepared.problems:
        raise ConfigError(*prepared.problems)
    for path, (value, reason) in defaults.items():
        if path not in prepared.written:
            _set_at(prepared.data, path.split("."), value)
            prepared.dialect.add(path)
            prepared.notes[path] = reason
    return prepared


def _set_at(data: dict[str, Any], names: list[str], value: Any) -> None:
    """Set the value at the path ``names`` in nested dicts, adding inner dicts where they are missing. Do nothing if a
    value on the way is no dict."""
    *parents, last = names
    for name in parents:
        inner = data.setdefault(name, {})
        if not isinstance(inner, dict):
            return
        data = inner
    data[last] = value


def _refuse_removed(raw: dict[str, Any], prepared: PreparedSource) -> None:
    """Add a problem to ``prepared`` for each key of older configurations (`REMOVED_KEYS`) in ``raw``, the file as a
    dict."""
    zero = raw.get("zero_optimization")
    for path, action in REMOVED_KEYS.items():
        parent, _, key = path.rpartition(".")
        if key in (raw if not parent else zero if isinstance(zero, dict) else ()):
            expected = "expected no such key: it was removed, and is refused even when switched off"
            prepared.problems.append(Problem(path, expected, "", action=action))


def _modernised(raw: dict[str, Any], prepared: PreparedSource) -> dict[str, Any]:
    """Return a copy of the file ``raw`` without keys of older configurations (`REMOVED_KEYS`) and the key "$schema",
    and with `zero_optimization` in its present form if it is a boolean or has `cpu_offload*` flags.

    Notes and problems about what was changed are added to ``prepared``."""
    raw = {key: value for key, value in raw.items() if key not in (*REMOVED_KEYS, SCHEMA_KEY)}
    zero = raw.get("zero_optimization")
    if isinstance(zero, bool):
        prepared.notes["zero_optimization.stage"] = f"from the legacy form zero_optimization: {str(zero).lower()}"
        return {**raw, "zero_optimization": {"stage": int(zero)}}
    if not isinstance(zero, dict):
        return raw
    zero = {key: value for key, value in zero.items() if f"zero_optimization.{key}" not in REMOVED_KEYS}
    return {**raw, "zero_optimization": _without_cpu_offload(zero, prepared)}


def _without_cpu_offload(zero: dict[str, Any], prepared: PreparedSource) -> dict[str, Any]:
    """Return ``zero``, the section `zero_optimization`, with its deprecated `cpu_offload*` flags replaced by
    `offload_*` sections; ``zero`` is changed in place.

    Notes about that, and problems of flags that are no booleans or contradict those sections, are added to
    ``prepared``."""
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    if pinned is not None and not any(zero.get(old) for old in _CPU_OFFLOAD):
        path, expected = "zero_optimization.cpu_offload_use_pin_memory", "expected cpu_offload: true with it"
        action = "set pin_memory in offload_optimizer or offload_param"
        prepared.problems.append(Problem(path, expected, show(pinned), action=action))
    for old, new in _CPU_OFFLOAD.items():
        if old not in zero:
            continue
        path, value = f"zero_optimization.{old}", zero.pop(old)
        if value is not None and not isinstance(value, bool):
            prepared.problems.append(Problem(path, "expected true or false", show(value)))
        elif value and zero.get(new) is not None:
            expected, action = f"expected either {old} or {new}", "keep only the newer one"
            prepared.problems.append(Problem(path, expected, "both", action=action))
        elif value is not None and zero.get(new) is None:
            prepared.notes[f"zero_optimization.{new}.device"] = f"from the deprecated {path}"
        if value is True and zero.get(new) is None:
            zero[new] = {"device": "cpu", **({} if pinned is None else {"pin_memory": pinned})}
    return zero


def _canonical(
    data: dict[str, Any], section: type[Section], path: str, written: str, into: PreparedSource
) -> dict[str, Any]:
    """Return ``data``, an object of the file, under canonical keys. Add its keys, "auto"s, notes and problems to
    ``into``.

    ``section``: the class that the object is read as. ``path``: the object's canonical path; ``written``: its path as
    the user wrote it; each is empty or ends with a dot."""
    out: dict[str, Any] = {}
    open_ended = section.model_config.get("extra") == "allow"
    for key, value in data.items():
        name = section.aliases.get(key, key)
        here, there = path + name, written + key
        if name not in section.model_fields and not open_ended:
            into.problems.append(_unknown_key(key, there, section))
        elif here in into.written:
            expected = f"expected either {into.written[here]} or {there}: they are one key"
            into.problems.append(Problem(there, expected, "both", action="remove one"))
        else:
            into.written[here] = there
            if key != name:
                into.notes[here] = f"written as {key}"
            if value == "auto" and section.accepts_auto(name):
                into.auto.add(here)
                if name in section.model_fields and section.model_fields[name].is_required():
                    out[name] = None
                continue
            child = section.section_of(name, data)
            nested = child is not None and isinstance(value, dict)
            out[name] = _canonical(value, child, f"{here}.", f"{there}.", into) if nested and child else value
    return out


def _unknown_key(key: str, path: str, section: type[Section]) -> Problem:
    """Return the problem of an unknown ``key`` of ``section``. It suggests a similar key, or the path at which ``key``
    is valid.

    ``path``: where the user wrote the key."""
    if key == "max_grad_norm":
        return Problem(path, "unknown key", "", "gradient_clipping", "clipping is a key of its own, at the top")
    nearest = difflib.get_close_matches(key, section.written_keys(), n=1, cutoff=0.6)
    elsewhere = [place for place in _valid_paths(ConfigFile, key, "") if place != path]
    if elsewhere and not (nearest and _nearly_equal(key, nearest[0])):
        return Problem(path, "unknown key", "", elsewhere[0], "the key belongs there")
    if nearest:
        return Problem(path, "unknown key", "", nearest[0], "correct it or remove it")
    return Problem(path, "unknown key", "", None, f"the keys here are {', '.join(section.written_keys())}")


def _nearly_equal(key: str, other: str) -> bool:
    """Return whether one key looks like a misspelling of the other: difflib's similarity is above 0.85."""
    return difflib.SequenceMatcher(None, key, other).ratio() > 0.85


def _valid_paths(section: type[Section], key: str, path: str) -> list[str]:
    """Return the paths in ``section``, and the sections inside, at which ``key`` would be valid.

    ``path``: that of the section, with a dot at the end; empty at the top."""
    found = [path + key] if key in section.written_keys() and path + key not in REMOVED_KEYS else []
    for name in section.model_fields:
        child = section.section_of(name, {})
        if child is not None:
            found += _valid_paths(child, key, f"{path}{name}.")
    return found
