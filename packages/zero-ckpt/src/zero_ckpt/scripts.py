"""The script `zero_to_fp32.py` that is put beside checkpoints, as DeepSpeed does."""

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
    """Put an executable `zero_to_fp32.py` into the directory `root` unless it has one; an empty file (left by a power
    cut) is replaced.

    Takes the root's lock only to write the script. Raises CheckpointError when that is not free within ten minutes, and
    OSError when the script cannot be written.
    """
    path = root / SCRIPT_NAME
    if _is_wanted(path):
        with root_lock(root):  # a sweep would take the file that is being written for one that was left behind
            if _is_wanted(path):
                replace_durably(path, SCRIPT.encode(), 0o777)


def _is_wanted(path: Path) -> bool:
    """Return whether the script is to be written: there is nothing at `path`, or an empty file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(found.st_mode) and found.st_size == 0
