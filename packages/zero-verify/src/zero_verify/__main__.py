"""Run one rank of a verification: `python -m zero_verify PLAN`, the path of a stored `ScriptRun`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from .running import ScriptRun, run_script

if torch.accelerator.is_available():
    torch.use_deterministic_algorithms(True, warn_only=True)
run_script(ScriptRun.read(Path(sys.argv[1])))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
