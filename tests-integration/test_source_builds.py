"""A native package that is built where no compiler is says so first, and names the wheel that needs none."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NATIVE = sorted(path.parent.name for path in ROOT.glob("packages/*/CMakeLists.txt"))


@pytest.mark.parametrize("package", NATIVE)
def test_a_missing_compiler_is_the_first_line_with_the_wheels_name(package: str, tmp_path: Path) -> None:
    programs = {name: shutil.which(name) for name in ("cmake", "ninja")}
    if not all(programs.values()):
        pytest.skip("there is no cmake or ninja here")
    (tmp_path / "bin").mkdir()
    for name, program in programs.items():
        (tmp_path / "bin" / name).symlink_to(str(program))
    done = subprocess.run(
        ["cmake", "-G", "Ninja", "-S", str(ROOT / "packages" / package), "-B", str(tmp_path / "build")],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    assert lines[0].startswith("CMake Error at ") and "find_package" not in lines[0], done.stderr
    said = " ".join(lines[1:])
    assert f"{package} is built from source here, and there is no C++17 compiler" in said
    assert re.search(rf"{package.replace('-', '_')}-\S+-manylinux\S*_\w+\.whl", said), said
    assert len(re.findall("CMake Error", done.stderr)) == 1, done.stderr
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text(encoding="utf-8")
    assert "NOTFOUND" not in cache, "the next build in this folder would not look for a compiler"
