"""The `zero_to_fp32.py` that is left beside checkpoints, for the habits of people who come from DeepSpeed."""

from __future__ import annotations

import stat
from pathlib import Path

from .durable import replace_durably
from .locking import root_lock

SCRIPT_NAME = "zero_to_fp32.py"
SCRIPT = '''#!/usr/bin/env python
"""Make one fp32 state dict of the checkpoint beside this file: zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR."""

import sys

try:
    from zero_ckpt.zero_to_fp32 import main
except ModuleNotFoundError:
    sys.exit("zero_to_fp32.py needs zero-ckpt: pip install zero-ckpt[torch]")
sys.exit(main())
'''


def leave_script(root: Path) -> None:
    """Put an executable `zero_to_fp32.py` into `root` unless one is there; an empty one is what a power cut left."""
    path = root / SCRIPT_NAME
    if _is_wanted(path):
        with root_lock(root):  # against sweeps, which take a file that is being written for one that was left behind
            if _is_wanted(path):
                replace_durably(path, SCRIPT.encode(), 0o777)


def _is_wanted(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(found.st_mode) and found.st_size == 0
