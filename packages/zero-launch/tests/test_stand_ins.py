"""`--as-NAME`: another package answers to a package's name in the ranks, found by its entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from zero_launch.stand_ins import search_paths

SCRIPT = "import os, other\nprint('sees', other.VALUE, os.environ['PATH'].split(os.pathsep)[0])\n"


def installed(folder: Path) -> dict[str, str]:
    """The environment of a process in which a package answers to ``other``."""
    info = folder / "double-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: double\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zero_launch.as]\nother = double:folders\n")
    names = folder / "names"
    names.mkdir()
    (names / "other.py").write_text("VALUE = 'the double'\n")
    paths = {"PYTHONPATH": str(names), "PATH": str(names / "bin")}
    (folder / "double.py").write_text(f"def folders():\n    return {paths!r}\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def zero_launch(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zero_launch", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_ranks_see_the_names_of_a_package_that_answers_to_them(tmp_path: Path) -> None:
    environment, script = installed(tmp_path), tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = zero_launch(environment, "--as-other", "--nproc", "1", str(script))
    assert f"sees the double {tmp_path / 'names' / 'bin'}" in done.stdout, done.stderr
    assert "--as-other" in zero_launch(environment, "--help").stdout
    without = zero_launch(environment, "--nproc", "1", str(script))
    assert without.returncode != 0 and "No module named 'other'" in without.stdout + without.stderr


def test_a_name_that_nobody_answers_to_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    done = zero_launch(installed(tmp_path), "--as-nobody", "--nproc", "1", "train.py")
    assert done.returncode == 2
    assert "--as-nobody: no installed package answers to 'nobody' (available: --as-" in done.stderr
    assert "--as-other" in done.stderr and "install the one that does" in done.stderr


def test_without_a_name_search_paths_are_left_alone() -> None:
    assert search_paths([], {"PYTHONPATH": "a"}) == {}
