"""Where a Slurm cluster has to be, as in the nightly workflow, its absence is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import slurm_cluster
from pages import DOCS

NIGHTLY = DOCS.parent / ".github" / "workflows" / "nightly.yml"


@pytest.mark.parametrize("required", [True, False])
def test_a_page_whose_cluster_cannot_be_is_skipped_unless_it_is_required(tmp_path: Path, required: bool) -> None:
    command = [sys.executable, slurm_cluster.__file__, str(DOCS / "tutorials" / "slurm.md"), str(tmp_path)]
    env = {**os.environ, "PATH": str(tmp_path), "ZERO_SLURM": "required" if required else ""}  # no program of Slurm's
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode == 0) == (not required), done.stderr
    assert ("skipped: " in done.stdout) == (not required)
    assert ("ZERO_SLURM=required, but there can be no Slurm cluster here: " in done.stderr) == required


def test_the_nightly_workflow_requires_the_cluster_wherever_it_installs_one() -> None:
    jobs = NIGHTLY.read_text(encoding="utf-8").split("runs-on:")
    installing = ["ZERO_SLURM: required" in job for job in jobs if "slurmctld" in job]
    assert installing and all(installing)
