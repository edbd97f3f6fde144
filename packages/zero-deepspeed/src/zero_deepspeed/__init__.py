"""The names of DeepSpeed, answered by this project, for scripts and frameworks that import `deepspeed`.

`import deepspeed` finds this project only on request: by `zero-launch --as-deepspeed script.py`, by
`PYTHONPATH=$(python -m zero_deepspeed)` before any launcher, or by `activate()` first in a script or a notebook. The
folder `path_entry` holds an importable package `deepspeed` with its metadata. `names.py` is the table of its names:
where each is answered, or what to use instead. Read that first, then `engine.py`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from zero_core.errors import UsageError

VERSION = "0.19.8"
"""The version of DeepSpeed whose names and semantics are answered; this package's own version begins with it."""

_LOOK_WHEN_IMPORTED = ("accelerate", "transformers.integrations.deepspeed", "lightning.fabric.strategies.deepspeed")

__all__ = ["VERSION", "activate", "commands", "path", "search_paths"]


def path() -> Path:
    """Return the folder to put on the module search path (`sys.path`, or the variable PYTHONPATH)."""
    return Path(__file__).resolve().parent / "path_entry"


def commands() -> Path:
    """Return the folder with the commands `deepspeed` and `ds_report`, to put on the variable PATH."""
    return path() / "bin"


def search_paths() -> dict[str, Path]:
    """Return {"PYTHONPATH": `path()`, "PATH": `commands()`}: the folders that ranks under `zero-launch --as-deepspeed`
    search first. It is the function of the entry point `zero_launch.as`."""
    return {"PYTHONPATH": path(), "PATH": commands()}


def activate() -> None:
    """Make `import deepspeed` find this project, in this process and in those that multiprocessing starts from it.

    Call it before anything imports deepspeed or a framework. Raises `UsageError` when it is too late: after the import
    of another `deepspeed`, or of a framework that looks for deepspeed when it is imported.
    """
    entry = str(path())
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and Path(str(loaded.__file__)).parent.parent != path():
        raise UsageError(
            f"activate(): deepspeed is imported already, from {loaded.__file__}; call activate() first in the script, "
            "before anything that imports deepspeed"
        )
    if entry in sys.path:
        return
    looked = [name for name in _LOOK_WHEN_IMPORTED if name in sys.modules]
    if looked:
        raise UsageError(
            f"activate(): {looked[0]} is imported already and has looked for deepspeed; call activate() before it"
        )
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
