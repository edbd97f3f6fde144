"""The public surface is exactly what `__all__` says, and importing it brings no torch."""

from __future__ import annotations

import subprocess
import sys

import zero_ckpt


def test_all_is_sorted_and_complete() -> None:
    assert zero_ckpt.__all__ == sorted(zero_ckpt.__all__)
    assert all(hasattr(zero_ckpt, name) for name in zero_ckpt.__all__)


def test_importing_the_package_imports_neither_torch_nor_numpy_nor_rich() -> None:
    code = "import sys, zero_ckpt, zero_ckpt.cli; assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
