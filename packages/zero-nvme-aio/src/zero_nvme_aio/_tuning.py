"""Settings found by `tune`, kept per device in the user's cache folder."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

__all__ = ["Tuning", "cache_path", "device_key", "lookup", "remember"]

_BACKENDS = ("io_uring", "libaio", "threads")


class Tuning(NamedTuple):
    """The best setting for one device: backend, bytes per block, blocks in flight per thread, threads, and the GB/s
    (1e9 bytes) that were reached.
    """

    backend: str
    block_bytes: int
    queue_depth: int
    threads: int
    read_gb_per_s: float
    write_gb_per_s: float


def cache_path() -> str:
    """Return the file that holds the settings: `$XDG_CACHE_HOME/zero-nvme-aio/tune.json`, under `~/.cache` by
    default.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(root, "zero-nvme-aio", "tune.json")


def device_key(path: str) -> str | None:
    """Return a text that identifies, on this host, the device on which `path` is, or its folder if `path` does not
    exist yet; None if neither exists.
    """
    for candidate in (path, os.path.dirname(path) or "."):
        try:
            device = os.stat(candidate).st_dev
        except OSError:
            continue
        return f"{os.uname().nodename}:{os.major(device)}:{os.minor(device)}"
    return None


def lookup(path: str) -> Tuning | None:
    """Return the setting stored for the device of `path`; None if it was never tuned, or the stored setting
    is invalid.
    """
    if not os.path.exists(cache_path()):
        return None
    key = device_key(path)
    entry = None if key is None else _read_entries().get(key)
    return None if entry is None else _valid_tuning(entry)


def remember(path: str, tuning: Tuning) -> None:
    """Store `tuning` for the device of `path`, in place of an earlier one; FileNotFoundError if neither `path` nor its
    folder exists, OSError if the file of settings cannot be written.
    """
    import json

    key = device_key(path)
    if key is None:
        raise FileNotFoundError(f"'{path}' does not exist, so it is on no device")
    entries = _read_entries()
    entries[key] = tuning._asdict()
    target = cache_path()
    os.makedirs(os.path.dirname(target), exist_ok=True)
    scratch = f"{target}.{os.getpid()}"
    with open(scratch, "w") as file:
        json.dump(entries, file, indent=1, sort_keys=True)
    os.replace(scratch, target)


def _read_entries() -> dict[str, Any]:
    """Return the content of the file of settings, undecoded: the fields of a `Tuning` by name, for each device key.
    Empty if the file is missing or damaged.
    """
    import json

    try:
        with open(cache_path()) as file:
            entries = json.load(file)
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _valid_tuning(entry: Any) -> Tuning | None:
    """Return an entry of the file of settings as a `Tuning`; None unless it has exactly the fields, a known backend,
    and numbers that `Engine` accepts.
    """
    try:
        tuning = Tuning(**entry)
        whole = [tuning.block_bytes, tuning.queue_depth, tuning.threads]
    except TypeError:
        return None
    if tuning.backend not in _BACKENDS or not all(isinstance(n, int) and n > 0 for n in whole):
        return None
    if tuning.block_bytes % 4096 or tuning.block_bytes > 1 << 30 or tuning.queue_depth > 4096 or tuning.threads > 256:
        return None
    return tuning
