"""The parity oracle: compare a script's training under a configuration with the same script at stage 0.

Names are imported on first use: the command's parser needs neither them nor torch. Read `variants.py` first, then
`recorder.py` (which runs in the ranks), `recording.py` and `comparison.py` (which read the results).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison import Bitwise, Difference, Judge, Within, compare
    from .recording import Recording
    from .running import ScriptRun, run_script
    from .variants import Variant

__version__ = "0.1.0"

_LAZY = {
    "Bitwise": ".comparison",
    "Difference": ".comparison",
    "Judge": ".comparison",
    "Recording": ".recording",
    "ScriptRun": ".running",
    "Variant": ".variants",
    "Within": ".comparison",
    "compare": ".comparison",
    "run_script": ".running",
}

__all__ = ["Bitwise", "Difference", "Judge", "Recording", "ScriptRun", "Variant", "Within", "compare", "run_script"]


def __getattr__(name: str) -> Any:
    """Return a public name from the module that defines it, which is imported now. Raises AttributeError for any other
    name."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return [*__all__, "__version__"]
