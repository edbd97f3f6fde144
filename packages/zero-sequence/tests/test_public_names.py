from __future__ import annotations

import subprocess
import sys

import zero_sequence


def test_every_listed_name_exists_and_the_list_is_sorted():
    assert zero_sequence.__all__ == sorted(zero_sequence.__all__)
    assert all(hasattr(zero_sequence, name) for name in zero_sequence.__all__)


def test_no_public_name_is_missing_from_the_list():
    public = {name for name, value in vars(zero_sequence).items() if not name.startswith("_") and callable(value)}
    assert public <= set(zero_sequence.__all__)


def test_importing_brings_no_package_but_torch_and_zero_comm():
    code = (
        "import sys, torch, zero_comm; before = set(sys.modules); import zero_sequence; "
        "print({m.split('.')[0] for m in set(sys.modules) - before} "
        "- {'zero_sequence', 'torch'} - sys.stdlib_module_names)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
