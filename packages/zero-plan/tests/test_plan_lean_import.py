"""The formulas import no torch, in a process of their own."""

from __future__ import annotations

import subprocess
import sys

import zero_plan

PROGRAM = """
import sys
from zero_plan.cli import main
words = "estimate --shape llama-3-8b --machine h100-sxm-80gb-x8 --world-size 64 --checkpointing full".split()
main(words)
main(["table", "--params", "7.5B", "--world-sizes", "1,64"])
main(["machine", "dgx-2"])
main([*words, "--json"])
heavy = {"torch", "numpy", "pydantic", "psutil", "zero_core", "zero_nvme_aio"}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def test_estimates_tables_and_machines_import_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "llama" not in done.stdout and "8,030,261,248 parameters" in done.stdout


def test_importing_the_package_does_not_import_rich() -> None:
    program = "import sys, zero_plan; sys.exit(bool({'rich', 'argparse'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_public_names_are_exact() -> None:
    import types

    assert zero_plan.__all__ == sorted(zero_plan.__all__)
    found = {
        name
        for name, value in vars(zero_plan).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert found - {"annotations"} == set(zero_plan.__all__) - {"infinity"}
