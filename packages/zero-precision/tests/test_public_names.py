from __future__ import annotations

import subprocess
import sys

import zero_precision


def test_every_listed_name_exists_and_the_list_is_sorted():
    assert zero_precision.__all__ == sorted(zero_precision.__all__)
    assert all(hasattr(zero_precision, name) for name in zero_precision.__all__)


def test_no_public_name_is_missing_from_the_list():
    imported = {"Any", "import_module"}
    public = {name for name, value in vars(zero_precision).items() if not name.startswith("_") and callable(value)}
    assert public - imported <= set(zero_precision.__all__)


def test_importing_brings_no_package_but_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import zero_precision; "
        "print({m.split('.')[0] for m in set(sys.modules) - before} "
        "- {'zero_precision', 'torch'} - sys.stdlib_module_names)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_importing_and_naming_a_dtype_does_not_bring_torch():
    code = "import sys, zero_precision as p; print(p.short_dtype_name('torch.BFloat16'), 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "bf16 False\n"
