"""The numbers of a run, read back from where each client stored them."""

from __future__ import annotations

import csv
import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import BATCH, INPUTS, LR, OUTPUTS, RANKS, batch, build, config, outcome, start, train, without
from torch import nn

import zero_core
from zero_comm import run_ranks
from zero_core.instruments import NoInstruments
from zero_core.monitors import NoMonitor


def read(folder: Path, job: str = "job") -> dict[str, list[tuple[int, float]]]:
    found = {}
    for path in sorted((folder / job).iterdir()):
        head, *rows = csv.reader(path.open())
        assert head[0] == "step" and path.stem.endswith(head[1])
        found[path.stem] = [(int(step), float(value)) for step, value in rows]
    return found


def csv_config(folder: str, **changes: Any) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}, **changes}


def accumulate(folder: str) -> tuple[list[float], bool]:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": LR}}
    engine = start(2, gradient_accumulation_steps=2, scheduler=schedule, **csv_config(folder))
    losses = train(engine, 0, 6)
    engine.monitor.write_events([("Mine/accuracy", 0.5, 24)])
    engine.destroy()
    return losses, engine.monitor.enabled


def test_csv_files_hold_rank_0s_losses_and_the_rates_by_samples_seen(tmp_path: Path) -> None:
    (losses, writes), (_, other_writes) = run_ranks(accumulate, RANKS, str(tmp_path))
    found = read(tmp_path)
    assert writes and not other_writes
    samples = [2 * BATCH * step for step in (1, 2, 3)]
    means = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert [step for step, _ in found["Train_Samples_train_loss"]] == samples
    assert [value for _, value in found["Train_Samples_train_loss"]] == pytest.approx(means, rel=1e-14)
    assert [step for step, _ in found["Train_Samples_lr"]] == samples
    assert found["Train_Samples_lr"][-1][1] == pytest.approx(LR) and found["Mine_accuracy"] == [(24, 0.5)]
    assert set(found) == {"Train_Samples_train_loss", "Train_Samples_lr", "Mine_accuracy"}


def test_a_second_run_appends_and_fp16_adds_its_loss_scale(alone: None, tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8}
    for _ in range(2):
        settings = {**without(config(0), "data_types"), **csv_config(str(tmp_path), fp16=fp16)}
        engine = zero_core.initialize(model=build(torch.float32), config=settings)[0]
        train(engine, 0, 2, torch.float16)
        engine.destroy()
    found = read(tmp_path)
    assert found["Train_Samples_loss_scale"] == [(BATCH, 256.0), (2 * BATCH, 256.0)] * 2
    assert len(found["Train_Samples_train_loss"]) == 4


def test_times_are_events_when_they_are_taken(alone: None, tmp_path: Path) -> None:
    train(start(1, wall_clock_breakdown=True, steps_per_print=100, **csv_config(str(tmp_path))), 0, 2)
    found = read(tmp_path)
    parts = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    times = {part: [v for _, v in found[f"Train_Samples_elapsed_time_ms_{part}"]] for part in parts}
    for whole, *inner in zip(times["backward"], times["backward_inner"], times["backward_allreduce"], strict=True):
        assert 0 < sum(inner) <= whole


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) - y).square().mean()


def tiny(settings: dict[str, Any]) -> list[float]:
    """Three steps; returns the losses."""
    engine = zero_core.initialize(model=Tiny(), config=config(0, **settings))[0]
    losses = train(engine, 0, 3)
    engine.destroy()
    return losses


def test_tensorboard_reads_back_what_was_written(alone: None, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = tiny({"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}})
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    found = events.Scalars("Train/Samples/train_loss")
    assert [event.step for event in found] == [BATCH, 2 * BATCH, 3 * BATCH]
    assert [event.value for event in found] == pytest.approx(losses)
    assert [event.value for event in events.Scalars("Train/Samples/lr")] == pytest.approx([LR] * 3)


def test_wandb_stores_the_run_offline(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    tiny({"wandb": {"enabled": True, "project": "a project", "group": "a group", "team": "a team"}})
    (stored,) = tmp_path.rglob("run-*.wandb")
    deadline = time.monotonic() + 20  # the client's own process writes the end of the file after `finish`
    while b"Train/Samples/train_loss" not in stored.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    content = stored.read_bytes()
    for text in ("a project", "a group", "a team", "Train/Samples/train_loss", "Train/Samples/lr", "AdamW"):
        assert text.encode() in content, text


def test_comet_stores_the_experiment_offline(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("comet_ml")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    secret = "not to be stored"
    losses = tiny(
        {"comet": {"enabled": True, "online": False, "project": "p", "samples_log_interval": 2 * BATCH,
                   "experiment_name": "named", "api_key": secret, "workspace": "a space", "mode": "create",
                   "experiment_key": "k" * 40}}
    )  # fmt: skip
    (stored,) = tmp_path.rglob("*.zip")
    with zipfile.ZipFile(stored) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        assert not any(secret.encode() in archive.read(name) for name in archive.namelist())
        experiment = json.loads(archive.read("experiment.json"))
    kept = ("offline_id", "project_name", "workspace", "resume_strategy")
    assert [experiment[name] for name in kept] == ["k" * 40, "p", "a space", "create"]
    metrics = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    logged = {(m["metricName"], m["step"]): float(m["metricValue"]) for m in metrics}
    assert logged["Train/Samples/train_loss", BATCH] == pytest.approx(losses[0])
    assert ("Train/Samples/train_loss", 2 * BATCH) not in logged  # the interval has not passed
    assert logged["Train/Samples/train_loss", 3 * BATCH] == pytest.approx(losses[2])


def hide(module: str, section: str) -> str:
    imported = sys.modules.get(module)
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        return outcome(lambda: start(0, **{section: {"enabled": True}}))
    finally:
        del sys.modules[module]
        if imported is not None:
            sys.modules[module] = imported


@pytest.mark.parametrize(
    ("section", "module"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")]
)
def test_a_client_that_is_not_installed_is_an_error_on_every_rank_that_names_the_extra(
    section: str, module: str
) -> None:
    for message in run_ranks(hide, RANKS, module, section):
        assert message.startswith("ImportError") and f"pip install 'zero-core[{section}]'" in message


def cannot_write(folder: str) -> str:
    def run() -> None:
        engine = start(0, **csv_config(folder))
        engine.backward(engine(*batch(0)))

    return outcome(run)


def test_a_monitor_that_cannot_start_ends_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_ranks(cannot_write, RANKS, str(tmp_path / "file"))
    assert first.startswith("NotADirectoryError") and "rank 0" in second and "NotADirectoryError" in second


def fills_up(folder: str) -> str:
    engine = start(1, **csv_config(folder))
    return outcome(lambda: train(engine, 0, 2))


def test_a_monitor_that_cannot_write_ends_every_rank(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "Train_Samples_train_loss.csv").symlink_to("/dev/full")
    first, second = run_ranks(fills_up, RANKS, str(tmp_path))
    assert first.startswith("OSError") and "No space" in first
    assert "rank 0" in second and "No space" in second


def test_without_a_monitor_nothing_is_held(alone: None) -> None:
    engine = start(0)
    assert isinstance(engine.monitor, NoMonitor) and isinstance(engine.instruments, NoInstruments)
    engine.monitor.write_events([("ignored", 1.0, 1)])
