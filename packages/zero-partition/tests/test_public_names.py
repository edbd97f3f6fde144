"""The names of the package, exactly."""

from __future__ import annotations

import subprocess
import sys

import zero_partition


def test_the_export_list_is_sorted_complete_and_documented() -> None:
    names = zero_partition.__all__
    assert names == sorted(names) and len(set(names)) == len(names)
    for name in names:
        assert getattr(zero_partition, name).__doc__, name


def test_importing_brings_only_the_two_packages_below() -> None:
    code = "import sys, zero_partition; print(sorted({m.split('.')[0] for m in sys.modules if m.startswith('zero_')}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['zero_comm', 'zero_partition', 'zero_precision']", done.stderr
