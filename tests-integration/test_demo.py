"""The demo at a small size: the whole way from text to a sample, in the processes that a user would start."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_report import read_run
from zero_report.analysis.analyse import analyse

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
STEPS = 24
SIZE = ["--layers", "1", "--width", "64", "--context", "32"]


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, encoding="utf-8", env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def curve(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ["return", "self", "value", "for", "in", "range", "if", "not", "None", "else"]
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text(" ".join(draw.choice(words) for _ in range(20_000)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo")
    steps = ["--steps", str(STEPS), "--ranks", "2", "--resume-ranks", "1"]
    printed = run(str(EXAMPLES / "demo.py"), "--run", str(folder), "--data", str(text), *steps, *SIZE)
    return folder, printed


def test_the_loss_falls(demo: tuple[Path, str]) -> None:
    losses = [row["loss"] for row in curve(demo[0])]
    assert losses[0] > 5.0
    assert sum(losses[-4:]) / 4 < 4.0


def test_a_run_resumed_at_another_world_size_goes_on_as_if_never_interrupted(
    demo: tuple[Path, str], text: Path, tmp_path: Path
) -> None:
    rows = curve(demo[0])
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["world_size"] for row in rows] == [2] * (STEPS * 2 // 3) + [1] * (STEPS - STEPS * 2 // 3)
    config = ["--config", str(demo[0] / "ds.json"), "--steps", str(STEPS)]
    run(str(EXAMPLES / "gpt.py"), "--run", str(tmp_path), "--data", str(text), *config, *SIZE)
    for row, alone in zip(rows, curve(tmp_path), strict=True):
        assert row["loss"] == pytest.approx(alone["loss"], abs=0.01), row["step"]
        assert row["lr"] == alone["lr"]


def test_each_rank_of_two_holds_about_half_of_the_optimizer_state(demo: tuple[Path, str]) -> None:
    rows = curve(demo[0])
    two, one = (rows[place]["model_state"]["optimizer states"] for place in (0, -1))
    assert two == pytest.approx(one / 2, rel=0.02)


def test_the_export_is_fp32_and_loads_in_plain_torch(demo: tuple[Path, str], text: Path) -> None:
    from safetensors.torch import load_file

    sys.path.insert(0, str(EXAMPLES))
    try:
        from model import GPT, Shape, read_text
    finally:
        sys.path.remove(str(EXAMPLES))
    weights = load_file(demo[0] / "gpt.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    model = GPT(Shape(layers=1, width=64, context=32))
    model.load_state_dict(weights)
    pieces = read_text(text)[: 33 * 64].long().view(64, 33)
    with torch.no_grad():
        loss = model(pieces[:, :-1], pieces[:, 1:]).item()
    last = [row["loss"] for row in curve(demo[0])[-4:]]
    assert loss == pytest.approx(sum(last) / 4, abs=0.3)


def test_sampling_imports_no_package_of_ours(demo: tuple[Path, str]) -> None:
    program = (
        "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__');"
        "assert not [name for name in sys.modules if name.startswith('zero_')]"
    )
    script, weights = str(EXAMPLES / "sample.py"), str(demo[0] / "gpt.safetensors")
    start = f"import sys; sys.argv = {[script, weights, '--bytes', '40', '--prompt', 'return ']!r};"
    start += f"sys.path.insert(0, {str(EXAMPLES)!r});"
    printed = run("-c", start + program)
    assert printed.startswith("return ")
    assert len(printed) > len("return ")


def test_the_demo_ends_with_a_report_of_both_parts(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    page = folder / "record" / "report.html"
    assert page.stat().st_size > 50_000
    assert str(page) in printed
    run = read_run(folder / "record")
    assert [attempt.world_size for attempt in run.attempts] == [2, 1]
    assert [attempt.first.table["steps"].sum() for attempt in run.attempts] == [STEPS * 2 // 3, STEPS // 3]
    assert run.problems == [] and run.replayed == 0
    unboxed = " ".join(printed.replace("│", " ").split())  # a long sentence goes over lines of the box
    assert analyse(run).verdict.sentence in unboxed
    assert printed.splitlines()[-1].startswith("A model sharded over 2 ranks was trained, resumed on one rank")


def test_the_curve_of_a_resumed_run_begins_with_what_was_before(
    demo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, printed = demo
    assert "left 0:00" in printed
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from display import earlier_losses

    losses = [row["loss"] for row in curve(folder)]
    assert earlier_losses(folder / "metrics.jsonl", STEPS - 3) == losses[:-3]
    assert earlier_losses(folder / "none.jsonl", STEPS) == []
