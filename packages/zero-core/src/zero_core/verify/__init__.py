"""The parity oracle: what a script computes under a configuration, against the same script at stage 0.

Read `variants.py` first, then `recorder.py` (in the ranks), `recording.py` and `comparison.py` (afterwards).
"""

from __future__ import annotations

from .comparison import Bitwise, Difference, Judge, Within, compare
from .recording import Recording
from .running import ScriptRun, run_script
from .variants import Variant

__all__ = ["Bitwise", "Difference", "Judge", "ScriptRun", "Recording", "Variant", "Within", "compare", "run_script"]
