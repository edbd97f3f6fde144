"""Read a configuration, a mapping or a JSON file, as plain data: dicts with string keys, lists and values.

``path`` is where a value is in the configuration, for errors: with a dot at the end, or empty at the top."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_settings._paths import start_of_relative_paths
from zero_settings.errors import ConfigError, Problem, show


def read(source: Any) -> dict[str, Any]:
    """Return a configuration as a new dict of plain data, at every depth; path objects become strings.

    ``source``: a mapping, or the path of a JSON file. Raises `ConfigError` for anything else, a file that is no JSON
    object or repeats a key, and keys that are not strings."""
    if isinstance(source, Mapping):
        return _plain_mapping(source, "")
    if isinstance(source, (str, os.PathLike)):
        return _read_file(Path(source))
    raise ConfigError(
        Problem("config", "expected a dict, the path of a JSON file or a Config", f"{type(source).__name__}")
    )


class _JsonObject(dict[str, Any]):
    """A JSON object as a dict, from its (key, value) pairs; the last pair of a key counts. `repeated` lists the keys
    that occur more than once, sorted."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs)
        self.repeated = sorted(key for key, count in counts.items() if count > 1)


_MOST_BYTES = 16 << 20
"""The limit of a configuration file: reading one takes several times its size in memory."""


def _read_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file as plain data.

    Raises `ConfigError` for a file that cannot be read, has more than 16 MiB, holds no JSON object or repeats a key; it
    names the line and column of a syntax error."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(Problem(str(path), f"expected at most {_MOST_BYTES} bytes of JSON", "more than that"))
        data = json.loads(content.decode("utf-8"), object_pairs_hook=_JsonObject)
    except ConfigError:
        raise
    except OSError as error:
        action = "" if path.is_absolute() else start_of_relative_paths()
        got = error.strerror or str(error)
        raise ConfigError(Problem(str(path), "expected a readable JSON file", got, action=action)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(str(path), "expected UTF-8 text", f"byte {error.start} that is not")) from error
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        action = "JSON has no comments and no commas before a closing bracket"
        raise ConfigError(Problem(where, "expected JSON", error.msg, action=action)) from error
    except RecursionError as error:
        raise ConfigError(Problem(str(path), "expected JSON", "objects or arrays nested too deeply")) from error
    except ValueError as error:  # a name that no file can have, or a number of thousands of digits
        raise ConfigError(Problem(show(str(path)), "expected a readable JSON file", str(error))) from error
    if not isinstance(data, dict):
        raise ConfigError(Problem(str(path), "expected a JSON object", type(data).__name__))
    problems = _repeated_keys(data, "")
    if problems:
        raise ConfigError(*problems)
    return _plain_mapping(data, "")


def _repeated_keys(value: Any, path: str) -> list[Problem]:
    """Return a problem for each key that an object in ``value`` repeats, at any depth; ``path``: that of ``value``."""
    problems = []
    if isinstance(value, _JsonObject):
        action = "JSON keeps only the last: remove the others"
        problems = [Problem(path + key, "expected the key once", "it twice", action=action) for key in value.repeated]
        for key, item in value.items():
            problems += _repeated_keys(item, f"{path}{key}.")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            problems += _repeated_keys(item, f"{path[:-1]}[{index}].")
    return problems


def _plain_mapping(value: Mapping[Any, Any], path: str) -> dict[str, Any]:
    """Return a mapping as a dict of plain data. Raises `ConfigError`, naming ``path``, for a key that is no string."""
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(Problem(path[:-1] or "config", "expected keys that are strings", f"the key {show(key)}"))
    return {key: _plain(item, f"{path}{key}.") for key, item in value.items()}


def _plain(value: Any, path: str) -> Any:
    """Return a value as plain data: mappings as dicts, lists and tuples as lists, path objects as strings; anything
    else as it is. Raises `ConfigError`, naming ``path``, for a key that is no string."""
    if isinstance(value, Mapping):
        return _plain_mapping(value, path)
    if isinstance(value, (list, tuple)):
        return [_plain(item, path) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
