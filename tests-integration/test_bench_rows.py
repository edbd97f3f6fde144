"""Benchmarks write the rows of their tables on docs/benchmarks.md themselves, as the page has them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEPT = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "docs/results").glob("*.json"))
}
GPT = ("--layers", "1", "--width", "64")
TINY = {
    "ckpt": ("--size-mib", "16", "--rounds", "1", "--only", "save"),
    "compressed": ("adam", "onebitadam", *GPT, "--steps", "20"),
    "instruments": ("--repetitions", "4"),
    "interception": (*GPT, "--rounds", "3", "--length", "4"),
    "offload": ("--only", "ours 3 cpu", "fsdp2 3 cpu", *GPT, "--rounds", "2", "--context", "16"),
    "saving": ("--only", "1 device fp32", *GPT, "--rounds", "1", "--context", "16"),
    "virtual-ranks": (*GPT, "--rounds", "2", "--context", "16", "--dtypes", "fp32", "--stages", "1", "--tiers", "none"),
    "zero-ratios": ("--only", "ours 2", "ddp", *GPT, "--rounds", "2", "--context", "16", "--dtypes", "fp32"),
}
"""Options with which a benchmark is small; the others need DeepSpeed, an accelerator or minutes."""


@pytest.mark.parametrize("name", KEPT)
def test_a_table_is_written_by_its_benchmark(name: str) -> None:
    source = (ROOT / KEPT[name]["bench"]).read_text(encoding="utf-8")
    assert f'save(__file__, "{name}", ' in source


@pytest.mark.soak
@pytest.mark.parametrize("name", TINY)
def test_a_small_run_writes_rows_of_the_pages_columns(name: str, tmp_path: Path) -> None:
    if name == "ckpt" and shutil.which("fio") is None:
        pytest.skip("no fio here (Debian: fio)")
    env = {**os.environ, "ZERO_BENCH_RESULTS": str(tmp_path / "results"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / KEPT[name]["bench"]), *TINY[name]]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert found["columns"] == KEPT[name]["columns"]
    assert found["rows"] and {len(row) for row in found["rows"]} == {len(found["columns"])}
    assert found["bench"] == KEPT[name]["bench"] and found["versions"]["torch"]


def test_a_run_that_the_benchmark_of_bounds_does_not_know_is_refused_before_anything_is_measured() -> None:
    bench = ROOT / "tests-integration" / "bench_bounds.py"
    done = subprocess.run([sys.executable, str(bench), "--only", "typo"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "'typo'" in done.stderr and "compute" in done.stderr and "disk" in done.stderr
