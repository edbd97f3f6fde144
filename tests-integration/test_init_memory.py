"""`keep_freed_memory` false holds while a model is built: blocks that `Init` frees go back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, psutil, torch, zero_core

config = {
    "train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}
}
with zero_core.Init({**config, **eval(sys.argv[1])}):
    torch.ones(1 << 20)  # freed at once: from now on glibc takes such blocks from its heap
    blocks = [torch.ones(1 << 20) for _ in range(40)]
    before = psutil.Process().memory_info().rss
    del blocks[:-1]
    print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.parametrize(("changes", "returned"), [({"keep_freed_memory": False}, True), ({}, False)])
def test_blocks_freed_inside_init_are_returned(tmp_path: Path, changes: dict[str, bool], returned: bool) -> None:
    command = [sys.executable, "-c", SCRIPT, repr(changes)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 100 << 20) is returned, done.stdout
