"""A job that dies leaves a report: the first cause on top, the last messages of every rank, the last moments."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import os, signal, sys, time
import torch, zero_core

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {
    "stage": int(sys.argv[2]), "unit_max_numel": 4160, "unit_min_numel": 4160, "stage3_param_persistence_threshold": 0}}
engine = zero_core.initialize(model=model, config=config, model_parameters=model.parameters())[0]
for step in range(8):
    if step == 6 and os.environ["RANK"] == "1":
        time.sleep(1.5)
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "leave":
            os._exit(0)
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()
"""


def data_of(page: Path) -> dict[str, Any]:
    match = re.search(r'<script type="application/gzip" id="data">([^<]*)</script>', page.read_text(encoding="utf-8"))
    assert match is not None
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return data


ALL = [pytest.param(how, stage, marks=pytest.mark.soak) for how in ("kill", "leave") for stage in range(4)]
FIRST = {"kill": "rank 1 of 2 failed first: died of SIGKILL", "leave": "rank 1 ended with exit status 0 while others"}


@pytest.mark.parametrize(("how", "stage"), [("kill", 3), *ALL])
def test_a_rank_that_is_gone_is_named_with_what_the_others_wait_for(tmp_path: Path, how: str, stage: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    record = tmp_path / "record"
    command = [sys.executable, "-m", "zero_launch", "--nproc", "2", "--record", str(record)]
    command += [str(script), how, str(stage)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment, check=False)
    assert done.returncode != 0, done.stdout
    assert f"report: {record / 'report.html'}" in done.stdout + done.stderr
    data = data_of(record / "report.html")
    assert data["verdict"]["ended"].startswith(FIRST[how])
    assert "rank 1, step 7: in the data loader or the script for 1." in data["verdict"]["detail"]
    assert data["totals"]["steps"] == 6
    flight = {row["rank"]: row for row in data["flight"]}
    assert sorted(flight) == [0, 1]
    assert "in step 6" in flight[0]["waits"] and flight[1]["waits"] is None
    assert all(row["last"] for row in flight.values())
    last = data["steps"]["steps"][-1]
    assert last["step"] == 7
    present = {rank["rank"]: rank for rank in last["ranks"]}
    assert present[1]["us"] > 1_000_000  # up to the last half second of its sleep
    names = [data["steps"]["names"][present[1]["spans"][6 * at + 1]] for at in present[1]["under_way"]]
    assert names[0] == "data"
