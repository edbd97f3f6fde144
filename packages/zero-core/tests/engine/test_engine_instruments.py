"""What a run says about itself when asked: times, operations, bytes sent and held; and the small facts."""

from __future__ import annotations

import contextlib
import io
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    BATCH,
    INPUTS,
    OUTPUTS,
    RANKS,
    STAGES,
    WIDTH,
    batch,
    build,
    config,
    outcome,
    start,
    train,
    weights,
    without,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_core
from zero_comm import Ledger, Tag, run_ranks
from zero_core.instruments import NoInstruments, NoTimers, Timers, communication_table
from zero_core.instruments.instruments import ProgressLines


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What goes to standard output where the program has not set up logging, as pytest has."""
    monkeypatch.setattr(logging.getLogger("zero_core"), "hasHandlers", lambda: False)
    return lambda: capsys.readouterr().out


def test_timers_add_up_parts_and_start_anew_when_taken() -> None:
    timers = Timers(torch.device("cpu"))
    for _ in range(2):
        with timers.during("outer"):
            with timers.during("inner"):
                time.sleep(0.01)
            time.sleep(0.005)
    with pytest.raises(KeyError), timers.during("failing"):
        raise KeyError
    taken = timers.take()
    assert taken["inner"] >= 20 and taken["outer"] >= taken["inner"] + 10 and taken["failing"] >= 0
    assert timers.take() == NoTimers().take() == {}


@pytest.mark.gpu
def test_timers_of_a_device_measure_what_it_computes_not_what_is_queued() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    timers, x = Timers(device), torch.randn(4096, 4096, device=device)
    with timers.during("products"):
        for _ in range(50):
            x = x @ x / 64
    queued = time.perf_counter()
    torch.accelerator.synchronize()
    waited = (time.perf_counter() - queued) * 1e3
    assert timers.take()["products"] >= waited / 2


def test_times_memory_and_progress_are_printed_every_few_steps(alone: None, printed: Any) -> None:
    engine = start(2, steps_per_print=2, wall_clock_breakdown=True, memory_breakdown=True)
    with torch.no_grad():
        engine(*batch(9))  # not a part of training
    train(engine, 0, 4)
    lines = printed().splitlines()
    assert [line.split(":")[0] for line in lines if "gradient norm" in line] == ["step 2", "step 4"]
    assert all("loss " in line and "samples per second" in line for line in lines if "gradient norm" in line)
    times = [line for line in lines if "ms of 2 micro-batches" in line]
    assert len(times) == 2
    for line in times:
        parts = {part: float(ms) for part, ms in (cell.split() for cell in line.split(": ")[1].split(", "))}
        assert parts["backward"] >= parts["backward_inner"] > 0 and min(parts.values()) >= 0
        assert list(parts) == ["forward", "backward", "backward_inner", "backward_allreduce", "step"]
    assert sum(line.startswith("all units") for line in lines) == 2
    assert sum(line.startswith("MiB after") and "process" in line for line in lines) == 2


def test_samples_per_second_are_those_since_the_last_line_after_a_resume_too(
    alone: None, printed: Any, tmp_path: Path
) -> None:
    start(0).save_checkpoint(tmp_path)
    engine = start(0, steps_per_print=2)
    engine.load_checkpoint(tmp_path)
    engine.global_samples = 10**9
    began = time.perf_counter()
    train(engine, 0, 2)
    taken = time.perf_counter() - began
    line = printed().splitlines()[-1]
    rate = float(line.split(" samples per second")[0].split(", ")[-1])
    assert 0 < rate <= 2 * BATCH / taken * 1.01  # the line counts from `initialize` on


def test_with_logging_set_up_the_same_goes_to_the_logger(
    alone: None, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    throughput = {"throughput": {"enabled": False}}
    with caplog.at_level(logging.INFO, logger="zero_core"):
        train(start(0, steps_per_print=1, timers=throughput), 0, 1)
    assert capsys.readouterr().out == "" and "step 1: loss " in caplog.text
    assert "samples per second" not in caplog.text


def test_a_run_says_in_one_line_what_it_is(alone: None, printed: Any) -> None:
    engine = start(3, zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}})
    (line,) = printed().splitlines()
    said = ["ZeRO stage 3, 1 rank on cpu", " in 1 unit (", f"batch {BATCH} = "]
    held = engine.memory_report(by="tier")
    said += [
        "parameter fp64",
        "master none",
        *(f"{held[tier] / 2**20:,.1f} MiB on {tier}" for tier in ("device", "host")),
    ]
    assert all(part in line for part in said), line


def test_without_a_number_of_steps_a_line_with_the_loss_of_the_step_comes_when_its_time_has_come(
    alone: None, printed: Any
) -> None:
    engine = start(2, gradient_accumulation_steps=2)
    quiet, every = (ProgressLines(engine.training_state, seconds=seconds) for seconds in (1e9, 0.0))
    losses = [torch.tensor(0.25), torch.tensor([0.5])]  # a script may take the loss of a batch of one
    train(engine, 0, 2)
    printed()
    for lines in (quiet, every):
        for loss in losses:
            lines.loss(loss)
        lines.after_step()
    (line,) = printed().splitlines()
    assert line.startswith("step 1: loss 0.75, gradient norm ") and ", lr 0.001, " in line, line
    assert "samples per second, skipped 0" in line, line


@pytest.mark.parametrize("steps", [0, float("inf")])
def test_steps_per_print_of_none_is_silence(alone: None, printed: Any, steps: float) -> None:
    train(start(1, steps_per_print=steps), 0, 2)
    assert printed() == ""


def test_zero_log_says_how_much_is_said(alone: None, printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(name) for name in ("zero_ckpt", "zero_comm", "zero_core", "zero_partition")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setenv("ZERO_LOG", "error")
    train(start(1, steps_per_print=1), 0, 1)
    assert printed() == "" and {logger.level for logger in loggers} == {logging.ERROR}
    monkeypatch.setenv("ZERO_LOG", "loud")
    with pytest.raises(zero_core.ConfigError, match="ZERO_LOG: expected debug, info, warning, error, got 'loud'"):
        start(1)


def test_dump_state_prints_every_value_and_the_units(alone: None, printed: Any) -> None:
    engine = start(2, dump_state=True)
    out = printed()
    assert all(row.path in out for row in engine.resolved_config.report())
    assert "parameter from" not in out and "ZeRO stage 2" in out and "blocks.1" in out


# -- operations --------------------------------------------------------------------------------------------------------

FORWARD = 2 * BATCH * (INPUTS * WIDTH + 2 * WIDTH * WIDTH + WIDTH * OUTPUTS)
BACKWARD = 2 * FORWARD - 2 * BATCH * INPUTS * WIDTH  # nobody asks for the gradient of the input


class Recomputing(nn.Module):
    """Its blocks run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.net, x, y, use_reentrant=False)


@pytest.mark.parametrize(
    ("model", "again"), [(build, 0), (Recomputing, FORWARD - 2 * BATCH * WIDTH * OUTPUTS)], ids=("plain", "recomputed")
)
@pytest.mark.parametrize("stage", (0, 3))
def test_operations_are_those_of_the_formula_recomputation_included(
    stage: int, model: Any, again: int, alone: None, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "profile.txt"
    profiler = {"enabled": True, "profile_step": 2, "output_file": str(path), "top_modules": 2, "module_depth": 2}
    engine = start(stage, model(), flops_profiler=profiler)
    train(engine, 0, 2)
    assert not path.exists()
    train(engine, 2, 4)
    text = path.read_text()
    parts = {words[0]: (float(words[1]), words[2]) for words in map(str.split, text.splitlines()[2:6])}
    assert parts["forward"] == (float(f"{FORWARD / 1e3:.4g}"), "kFLOP")
    assert parts["backward"][0] in [
        float(f"{n / 1e3:.4g}") for n in (BACKWARD + again, BACKWARD + FORWARD * bool(again))
    ]
    assert "step 2" in text and "samples per second" in text
    if not again:
        half = f"{2 * BATCH * WIDTH * WIDTH / 1e3:.4g} kFLOP"
        assert f"depth 2: blocks.0 {half}, blocks.1 {half}" in text
        blocks = next(line for line in text.splitlines() if line.split()[:2] == ["blocks", "ModuleList"])
        assert f"{2 * (WIDTH * WIDTH + WIDTH):,}" in blocks and f"{4 * BATCH * WIDTH * WIDTH / 1e3:.4g} kFLOP" in blocks


def everything_on(stage: int, folder: str) -> tuple[bool, str]:
    plain, watched = start(stage), None
    losses = train(plain, 0, 4)
    watched = start(
        stage,
        wall_clock_breakdown=True,
        memory_breakdown=True,
        flops_profiler={"enabled": True},
        comms_logger={"enabled": True, "verbose": True},
        csv_monitor={"enabled": True, "output_path": folder},
    )
    same = train(watched, 0, 4) == losses
    ends = [{n: v.numpy().tobytes() for n, v in weights(engine).items()} for engine in (plain, watched)]
    return same and ends[0] == ends[1], type(watched.instruments).__name__


@pytest.mark.parametrize("stage", STAGES)
def test_instruments_change_no_bit_and_only_rank_0_has_them(stage: int, tmp_path: Path) -> None:
    first, second = run_ranks(everything_on, RANKS, stage, str(tmp_path))
    assert first == (True, "PrintingInstruments") and second == (True, NoInstruments.__name__)


# -- communication -----------------------------------------------------------------------------------------------------


def test_the_table_of_what_was_sent_adds_up_by_phase_and_may_be_limited() -> None:
    ledger = Ledger()
    for tag, sent in ((Tag("gather", "a"), 2**20), (Tag("gather", "b"), 2**21), (Tag("reduce", "a"), 2**22)):
        ledger.count(tag, sent, sent // 2)
    rows = {line[:20].strip(): line.split()[-4:] for line in communication_table(ledger, steps=2).splitlines()[1:]}
    assert rows["gather"] == ["2", "3.00", "1.50", "1.50"] and rows["reduce"] == ["1", "4.00", "2.00", "2.00"]
    assert "gather" not in communication_table(ledger, frozenset(["reduce"]))


def spoken(section: dict[str, Any]) -> tuple[str, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        engine = start(2, comms_logger=section, steps_per_print=2)
        train(engine, 0, 2)
    return out.getvalue(), engine.communication_table()


def test_chosen_operations_are_printed_as_they_start_and_unknown_ones_refused(alone: None) -> None:
    section = {"enabled": True, "verbose": True, "prof_all": False, "prof_ops": ["all_reduce", "broadcast"]}
    (said, whole), (nothing, _) = run_ranks(spoken, RANKS, section)
    assert "reduce of 'blocks.0" in said and "broadcast of 'blocks.0" in said and "bytes sent" in said
    overlap = [line for line in said.splitlines() if line.startswith("step 2, communication: ")]
    assert len(overlap) == 1 and overlap[0].endswith("% hidden behind computation")
    assert said.count("sent by this rank") == 1 and "control" not in said and "publish" not in said
    assert "control" in whole and "publish" in whole and nothing == ""
    message = outcome(lambda: start(0, comms_logger={**section, "prof_ops": ["all_to_nobody"]}))
    assert message.startswith("UsageError: comms_logger.prof_ops") and "all_to_nobody" in message


# -- memory ------------------------------------------------------------------------------------------------------------


def held(stage: int) -> dict[str, Any]:
    engine = start(stage)
    train(engine, 0, 1)
    engine.backward(engine(*batch(1)))
    storages = [
        value.untyped_storage()
        for owned in engine.sharded_optimizer.fragments  # type: ignore[union-attr]
        for value in engine.sharded_optimizer.state[owned.tensor].values()  # type: ignore[union-attr]
    ]
    states = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # a step may be shared
    return {
        "expected": {**engine.partition.memory(), "optimizer states": states},
        **{by: engine.memory_report(by) for by in ("kind", "unit", "tier")},  # type: ignore[arg-type]
        "table": engine.memory_table(),
        "wrong": outcome(lambda: engine.memory_report("size")),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("stage", STAGES)
def test_memory_by_kind_unit_and_tier_is_the_same_memory(stage: int) -> None:
    for seen in run_ranks(held, RANKS, stage):
        assert seen["kind"] == seen["expected"]
        whole = sum(seen["kind"].values())
        assert sum(seen["unit"].values()) == whole and seen["tier"] == {"device": whole}
        shared = {"(arriving weights)"} & set(seen["unit"])  # of the stages whose steps gather weights
        assert bool(shared) == (stage in (1, 2))
        assert len(set(seen["unit"]) - shared) == 4 and "blocks.0 [float64]" in seen["unit"]
        last = seen["table"].splitlines()[-1].split()
        assert last[:3] == ["all", "units", "device"]
        assert sum(map(float, last[3:])) == pytest.approx(whole / 2**20, abs=0.05)
        assert seen["wrong"].startswith("UsageError")


@pytest.mark.parametrize(("device", "tier"), [("cpu", "host"), ("nvme", "nvme")])
def test_what_is_offloaded_counts_for_its_tier(device: str, tier: str, alone: None, tmp_path: Path) -> None:
    offload = {"device": device, "nvme_path": str(tmp_path)}
    settings = without(config(3, steps_per_print=1, memory_breakdown=True), "data_types")
    settings["zero_optimization"] |= {"offload_param": offload, "offload_optimizer": offload}
    engine = zero_core.initialize(model=build(torch.float32), config=settings)[0]
    train(engine, 0, 1, torch.float32)
    parts, found = engine.partition, engine.memory_report("tier")
    kept = dict(parts.states.memory())  # type: ignore[union-attr]
    of_tier = kept["nvme"] if tier == "nvme" else sum(kept.values()) - kept["nvme"]
    shards = 4 * parts.layout.numel if tier == "nvme" else 0  # one rank on the CPU: shards are where it computes
    assert found[tier] == shards + of_tier and of_tier >= 8 * parts.layout.used_numel
    assert sum(engine.memory_report("kind").values()) == sum(found.values())
    assert any(line.split()[:3] == ["all", "units", tier] for line in engine.memory_table().splitlines())
    engine.destroy()


# -- facts -------------------------------------------------------------------------------------------------------------


def batch_sizes(engine: zero_core.Engine) -> tuple[int, int, int]:
    sizes = engine.training_state.sizes
    return sizes.train, sizes.micro, sizes.steps


def test_the_batch_can_be_changed_between_steps(alone: None) -> None:
    engine = start(1)
    train(engine, 0, 1)
    engine.set_train_batch_size(3 * BATCH)
    assert batch_sizes(engine) == (3 * BATCH, BATCH, 3)
    train(engine, 0, 2)
    assert engine.global_steps == 1
    train(engine, 2, 3)
    assert engine.global_steps == 2 and engine.global_samples == 4 * BATCH
    engine.training_state.sizes.set_micro(2)
    assert batch_sizes(engine) == (6, 2, 3)
    for call, wrong in ((engine.set_train_batch_size, 5), (engine.training_state.sizes.set_micro, 0)):
        message = outcome(lambda call=call, wrong=wrong: call(wrong))  # type: ignore[misc]
        assert message.startswith("UsageError") and f"got {wrong}" in message
    assert batch_sizes(engine) == (6, 2, 3)


def test_without_an_optimizer_its_facts_are_refused_by_name(alone: None) -> None:
    engine = zero_core.initialize(model=build(), config=without(config(0), "optimizer"))[0]
    assert outcome(engine.get_lr).startswith("UsageError: engine.get_lr")
