"""`zero-launch doctor --swap`: other packages say what killed ranks left."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

FINDER = """
import pathlib

def report(folders, remove):
    found = [path for folder in folders for path in sorted(pathlib.Path(folder).glob("*.swap"))]
    for path in found if remove else ():
        path.unlink()
    return [f"{path.name} {'removed' if remove else 'left'}" for path in found]
"""


def doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor with a package of that name installed beside it."""
    info = folder / "finder-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: finder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zero_launch.leftovers]\nfinder = finder:report\n")
    (folder / "finder.py").write_text(FINDER)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "zero_launch", "doctor", *words]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60)


def test_files_of_killed_ranks_are_shown_and_removed_on_request(tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    (drive / "a.swap").touch()
    shown = doctor(tmp_path, "--swap", str(drive))
    assert (shown.returncode, "a.swap left" in shown.stdout) == (1, True), shown.stderr
    assert (drive / "a.swap").exists()
    removed = doctor(tmp_path, "--swap", str(drive), "--remove")
    assert (removed.returncode, "a.swap removed" in removed.stdout) == (0, True), removed.stderr
    assert not list(drive.iterdir())
    assert doctor(tmp_path, "--swap", str(drive)).returncode == 0


def test_removing_needs_to_be_told_where_also_by_the_installed_command():
    command = Path(sysconfig.get_path("scripts")) / "zero-launch"
    done = subprocess.run([command, "doctor", "--remove"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "--remove needs --swap DIR" in done.stderr) == (2, True)
