"""`Config`: a configuration, read, checked and resolved, with the origin of every value."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import PrivateAttr, ValidationError

from zero_settings import _batch, _rules
from zero_settings._base import PositiveInt, thaw
from zero_settings._explain import explain
from zero_settings._paths import absolute_path
from zero_settings._prepare import PreparedSource, prepare
from zero_settings._rank_rules import rank_problems, virtual_ranks
from zero_settings._schema import json_schema
from zero_settings._source import read
from zero_settings.errors import ConfigError, Problem, show
from zero_settings.features import leaves, no_effect, refusals
from zero_settings.keys import ConfigFile

_PATHS = (
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_optimizer.nvme_path",
    "offload.activations.nvme_path",
    "offload.trace",
    "checkpoint.path",
    "checkpoint.in_memory.path",
    "flops_profiler.output_file",
    "run_record.path",
    "run_record.plan",
)
"""Canonical paths of keys whose values name files and folders."""


class ReportRow(NamedTuple):
    """One value of a configuration: its path, the value as plain data, its origin, and a remark (empty where there is
    none).

    `provenance` is `user` (written in the file), `default`, `dialect` (a default that `Config.load` was given),
    `derived` (follows from other values), or `auto->default` or `auto->derived` (the file says "auto").
    """

    path: str
    value: Any
    provenance: str
    note: str


class Config(ConfigFile):
    """A resolved, immutable configuration. Build it with `Config.load`; read values as attributes.

    `config.zero_optimization.stage`, `config.optimizer.params.lr`, `config.train_batch_size`: every key of
    `ConfigFile`, of which the three batch sizes are always numbers here.
    """

    train_batch_size: PositiveInt
    train_micro_batch_size_per_gpu: PositiveInt
    gradient_accumulation_steps: PositiveInt

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)
    _world_size: int = PrivateAttr(default=1)
    _provenance: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(
        cls,
        source: Any,
        *,
        world_size: int,
        model_hint: Any = None,
        defaults: Mapping[str, tuple[Any, str]] | None = None,
    ) -> Config:
        """Read, check and resolve a configuration.

        Args:
            source: a dict, the path of a JSON file, or a `Config` (which is resolved again for `world_size`). It is not
                changed.
            world_size: the number of ranks; each `sequence_parallel_size` of them share their samples.
            model_hint: the model, its Hugging Face config, or a hidden size; fills bucket sizes that are "auto".
                Without a known hidden size they keep their defaults.
            defaults: path -> value and reason, for keys that the file leaves out and that have another default in the
                dialect, the library for which the file was written. Paths have the names of `ConfigFile`, not aliases.

        Raises `ConfigError`. Checks run in phases: the file, the keys, the values, the rules between values, features
        that are not available; the error has all problems of the first phase that finds any.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(Problem("world_size", "expected the number of ranks", show(world_size)))
        raw = source._raw if isinstance(source, Config) else read(source)
        prepared = prepare(raw, defaults or {})
        try:
            file = ConfigFile.model_validate(prepared.data)
        except ValidationError as error:
            raise ConfigError(*explain(error, prepared)) from error
        _raise_as_written(list(rank_problems(file, world_size)), prepared)
        samples = world_size // file.sequence_parallel_size
        derived = {**_rules.derived(file, prepared.auto, model_hint), **_batch_sizes(file, prepared, samples)}
        file = _rules.with_values(file, derived)
        _raise_as_written(_rules.contradictions(file, world_size), prepared)
        _raise_as_written(refusals(file), prepared)
        config = cls.model_construct(**dict(file))
        config._raw = copy.deepcopy(raw)
        config._world_size = world_size
        config._provenance = _provenance(config, prepared, derived)
        config._notes = prepared.notes
        return config

    @property
    def raw(self) -> dict[str, Any]:
        """Return the configuration as it was read, before aliases, "auto" and defaults were resolved, as a new dict."""
        return copy.deepcopy(self._raw)

    @property
    def virtual_ranks(self) -> int:
        """Return the number of virtual ranks (`deterministic.across_world_sizes`), 0 without them."""
        return virtual_ranks(self)

    @property
    def world_size(self) -> int:
        """Return the number of ranks that the configuration was resolved for."""
        return self._world_size

    @property
    def data_parallel_size(self) -> int:
        """Return the number of ranks that have samples of their own, those that share a sequence counted as one."""
        return self._world_size // self.sequence_parallel_size

    def to_plain(self) -> dict[str, Any]:
        """Return every resolved value as a dict of plain data, which can be stored, and from which `load` makes an
        equal configuration."""
        plain: dict[str, Any] = thaw(self.model_dump())
        return plain

    def with_absolute_paths(self) -> Config:
        """Return a copy in which the paths of files and folders are absolute; relative ones start at the current
        directory. Those that are null or empty stay. Raises FileNotFoundError if that directory no longer exists."""
        values = dict(leaves(self))
        given = {path: values[path] for path in _PATHS if values[path]}
        absolute = {
            path: absolute_path(value) if isinstance(value, str) else tuple(map(absolute_path, value))
            for path, value in given.items()
        }
        return _rules.with_values(self, absolute)

    def provenance(self, path: str) -> str:
        """Return the origin of the value at a path such as `fp16.enabled`: one of the words that `ReportRow` lists,
        such as "user" or "default". Raises KeyError if there is no such value."""
        return self._provenance[path]

    def report(self, *, defaults: bool = True) -> tuple[ReportRow, ...]:
        """Return one row per value, in the order of the keys; without `defaults`, no rows whose origin is `default`.

        Sections are flattened: a row's path is that of a value, such as `fp16.enabled`.
        """
        shown = (leaf for leaf in leaves(self) if defaults or self._provenance[leaf[0]] != "default")
        return tuple(self._row(path, value) for path, value in shown)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of a configuration file, aliases and "auto" included, every key with a description."""
        return json_schema()

    def _row(self, path: str, value: Any) -> ReportRow:
        """Return the report's row of the value at ``path``. Its remark says how the value was written and why it has no
        effect; values that are `derived` or a `default` have no such remark."""
        provenance = self._provenance[path]
        given = provenance in ("user", "dialect", "auto->derived", "auto->default")
        notes = [self._notes[place] for place in _prefixes(path) if place in self._notes and given]
        if path == "optimizer.type" and value == "adam" and self.optimizer and self.optimizer.decoupled_weight_decay:
            notes.append("decays weights as AdamW: set adam_w_mode to false for L2 regularisation")
        notes.append(no_effect(self, path) if given else "")
        return ReportRow(path, thaw(value), provenance, "; ".join(filter(None, notes)))


def _prefixes(path: str) -> list[str]:
    """Return the paths of the sections that contain the value at ``path``, outermost first, then ``path`` itself."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _batch_sizes(file: ConfigFile, prepared: PreparedSource, world_size: int) -> dict[str, int]:
    """Return, by key, the batch sizes that the file lacks or that a rule replaces.

    ``world_size``: the number of ranks with samples of their own. Raises `ConfigError` if the given sizes contradict
    each other."""
    given: dict[str, int | None] = {name: getattr(file, name) for name in (_batch.TRAIN, _batch.MICRO, _batch.STEPS)}
    any_auto = bool({_batch.TRAIN, _batch.MICRO} & prepared.auto)
    train, micro, steps = given.values()
    if steps is None and virtual_ranks(file):
        steps = virtual_ranks(file) // world_size
    if (rule := file.elastic.batch_size) is not None:
        sizes = _batch.resolve_by_rule(rule, train, micro, steps, world_size)
    else:
        sizes = _batch.resolve(train, micro, steps, world_size, any_auto=any_auto)
    return {name: size for (name, value), size in zip(given.items(), sizes, strict=True) if value != size}


def _provenance(config: Config, prepared: PreparedSource, derived: dict[str, Any]) -> dict[str, str]:
    """Return, by path, the origin of every value: one of the words that `ReportRow` lists, such as "user" or "default".
    ``derived`` has the values that follow from others, by path."""
    found = {}
    for path, _ in leaves(config):
        auto = path in prepared.auto
        if path in derived:
            found[path] = "auto->derived" if auto else "derived"
        elif path in prepared.dialect:
            found[path] = "dialect"
        elif auto:
            found[path] = "auto->default"
        else:
            found[path] = "user" if path in prepared.written or path in prepared.notes else "default"
    return found


def _raise_as_written(problems: list[Problem], prepared: PreparedSource) -> None:
    """Raise `ConfigError` if there are problems, with their paths in the names that the user wrote; otherwise do
    nothing."""
    if problems:
        raise ConfigError(*(_as_written(problem, prepared) for problem in problems))


def _as_written(problem: Problem, prepared: PreparedSource) -> Problem:
    """Return a copy of the problem whose path has the names that the user wrote, and whose ``got`` includes the note
    about that value, if there is one."""
    note = prepared.notes.get(problem.path, "")
    got = f"{problem.got}, {note}" if note and problem.got else problem.got
    return replace(problem, path=prepared.as_written(problem.path), got=got)
