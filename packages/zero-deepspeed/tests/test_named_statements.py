"""DeepSpeed's public names behave as there: `peer_names_job.py` says how, and holds for DeepSpeed too (marked peer)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from peer_names_job import STATEMENTS

import zero_deepspeed

SCRIPT = Path(__file__).with_name("peer_names_job.py")
WHOSE = (
    "ours",
    pytest.param(
        "theirs",
        marks=[
            pytest.mark.peer,
            pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
        ],
    ),
)


@pytest.fixture(scope="module", params=WHOSE)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = [str(zero_deepspeed.path())] if request.param == "ours" else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    folder = tmp_path_factory.mktemp(request.param)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str] = json.loads(done.stdout.rpartition("seen ")[2])
    return found


@pytest.mark.parametrize("name", STATEMENTS)
def test_as_there(name: str, seen: dict[str, str]) -> None:
    assert seen[name] == ""
