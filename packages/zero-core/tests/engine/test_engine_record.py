"""The run's record says what the engine did: the same sums as the ledger, the memory table and the clock."""

from __future__ import annotations

import gc
import json
import logging
import platform
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import BLOCK, RANKS, STAGES, WIDE, batch, build, recorded, start, train
from torch import nn

import zero_core
from zero_comm import run_ranks
from zero_core.instruments import NoInstruments
from zero_report import SpanKind, read_run, write_report
from zero_report.analysis.analyse import analyse
from zero_report.page.data import page_data

STEPS = 6
ZERO = {"stage": 3, "unit_min_numel": BLOCK, "stage3_param_persistence_threshold": BLOCK // 2}


def _train_and_count(path: str, stage: int, changes: dict[str, Any]) -> dict[str, Any]:
    """What this rank's ledger, memory table and clock say after a few steps."""
    engine = start(stage, **recorded(Path(path), **changes))
    began = time.perf_counter()
    after_first = {}
    losses = []
    for step in range(STEPS):
        losses += train(engine, step, step + 1)
        if step == 0:
            after_first = engine.memory_report()
    seconds = time.perf_counter() - began
    rows = {(phase, name): (row.calls, row.sent_bytes, row.waited_seconds) for phase, name, row in engine.ledger}
    engine.save_checkpoint(f"{path}/ckpt", tag=str(stage))
    html = engine.report().html
    engine.destroy()
    return {
        "rows": rows,
        "memory": after_first,
        "seconds": seconds,
        "losses": losses,
        "html": len(html),
        "threads": [thread.name for thread in threading.enumerate() if "zero-report" in thread.name],
    }


@pytest.mark.parametrize(("stage", "ranks"), [*((stage, RANKS) for stage in STAGES), (3, 4)])
def test_sums_are_the_ledgers_the_memory_tables_and_the_clocks(tmp_path: Path, stage: int, ranks: int) -> None:
    results = run_ranks(_train_and_count, ranks, str(tmp_path), stage, {})
    run = read_run(tmp_path)
    assert run.problems == []
    assert sorted(run.last.ranks) == list(range(ranks))
    for rank, found in enumerate(results):
        record = run.last.ranks[rank]
        assert record.closed and found["threads"] == []
        table = record.table
        assert table["steps"].sum() == STEPS
        assert np.allclose(table["loss"], found["losses"], rtol=1e-9)
        assert (table["grad_norm"] > 0).all() and (table["lr"] == 1e-3).all()
        steps = found["rows"]
        assert table["sent_bytes"].sum() == sum(sent for _, sent, _ in steps.values()) > 0
        assert table["collectives"].sum() == sum(calls for calls, _, _ in steps.values())
        spans = [span for step in range(1, STEPS + 1) if (block := record.block(step)) for span in block.spans]
        for phase, kind in (("gather", 4), ("reduce", 5)):
            counted = sum(row[1] for key, row in steps.items() if key[0] == phase)
            assert sum(span.nbytes for span in spans if span.kind == kind) == counted
            waited = sum(row[2] for key, row in steps.items() if key[0] == phase)
            assert sum(span.waited for span in spans if span.kind == kind) / 1e6 == pytest.approx(waited, abs=1e-3)
        assert table["seconds"].sum() == pytest.approx(found["seconds"], rel=0.05, abs=0.3)
        assert float(table["began"][-1] + table["seconds"][-1] - table["began"][0]) == pytest.approx(
            float(table["seconds"].sum()), abs=1e-3
        )
        block = record.block(1)
        assert block is not None
        held = block.memory[-1][1]
        kinds = found["memory"]
        assert held.get("masters", 0) == kinds["masters"]
        assert held.get("states", 0) == kinds["optimizer states"]
        assert held.get("gradients", 0) == kinds["gradients"]
        assert held.get("gathered", 0) == kinds["gathered parameters"]
        assert held.get("parameters", 0) == sum(
            kinds[kind] for kind in ("parameter shards", "secondary shards", "placeholders")
        )
        assert found["html"] > 50_000
    checkpoint = next(note for note in run.last.ranks[0].notes if note["note"] == "checkpoint")
    assert checkpoint["bytes"] > 24 * 2 * BLOCK and checkpoint["path"].endswith(f"ckpt/{stage}")
    assert not [note for note in run.last.ranks[0].notes if note["note"] == "failure"]


def _train_units(path: str, stage: int, changes: dict[str, Any]) -> list[str]:
    engine = start(stage, build(blocks=3), **recorded(Path(path), **changes))
    for number in range(4):
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*batch(number)))
            engine.step()
    names = [unit.name for unit in engine.partition.units if unit.plan.trainable]
    engine.destroy()
    return names


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (0, {}),
        (1, {"gradient_accumulation_steps": 3}),
        (2, {}),
        (3, {}),
        (3, {"zero_optimization": {**ZERO, "offload_optimizer": {"device": "cpu"}}}),
    ],
)
def test_each_unit_computes_in_every_pass_inside_its_phase(tmp_path: Path, stage: int, changes: dict[str, Any]) -> None:
    names = run_ranks(_train_units, RANKS, str(tmp_path), stage, changes)[0]
    run = read_run(tmp_path)
    passes = changes.get("gradient_accumulation_steps", 1)
    offloaded = "zero_optimization" in changes
    for record in run.last.ranks.values():
        block = record.block(3)
        assert block is not None
        found: dict[tuple[str, int], int] = {}
        for span in block.spans:
            if span.kind == SpanKind.COMPUTE:
                around = [
                    phase.kind
                    for phase in block.spans
                    if phase.kind in (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.UPDATE)
                    and phase.begin - 2 <= span.begin
                    and span.end <= phase.end + 2
                ]
                assert len(around) == 1, span
                found[span.name, around[0]] = found.get((span.name, around[0]), 0) + 1
        for name in names:
            assert found[name, SpanKind.FORWARD] >= passes
            assert found[name, SpanKind.BACKWARD] == (passes if stage >= 2 else 1)
        assert any(kind == SpanKind.UPDATE for _, kind in found) == offloaded


def test_memory_of_a_step_grows_by_activations_and_falls(alone: None, tmp_path: Path) -> None:
    engine = start(2, build(blocks=3, width=WIDE), **recorded(tmp_path))
    rows = torch.randn(4_000, 6, dtype=torch.float64), torch.randn(4_000, 3, dtype=torch.float64)
    for _ in range(3):
        engine.backward(engine(*rows))
        engine.step()
    engine.destroy()
    block = read_run(tmp_path).last.first.block(3)
    assert block is not None
    held = [owners["activations"] for _, owners in block.memory]
    layer = 4_000 * WIDE * 8
    assert held[0] == 0  # before the forward pass
    assert 6 * layer < max(held) < 16 * layer
    assert held[-1] < layer


def test_warnings_and_the_step_of_a_checkpoint_are_events(alone: None, tmp_path: Path) -> None:
    behind = {"checkpoint": {"writer": {"decoupled": True}}}
    engine = start(2, **recorded(tmp_path / "record", **behind))
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path / "ckpt")
    logging.getLogger("zero_ckpt").warning("the folder is %s", "slow")
    train(engine, 3, 4)
    engine.destroy()
    logging.getLogger("zero_ckpt").warning("after the end")
    notes = read_run(tmp_path / "record").last.first.notes
    assert [note["text"] for note in notes if note["note"] == "warning"] == ["the folder is slow"]
    saved = [note for note in notes if note["note"] == "checkpoint"]
    assert len(saved) == 1 and saved[0]["of_step"] == 3
    size = sum(file.stat().st_size for file in (tmp_path / "ckpt" / "global_step3").rglob("*") if file.is_file())
    assert saved[0]["bytes"] == size
    assert saved[0]["seconds"] >= saved[0]["blocked_s"] > 0


def _planned(path: Path, scale: float = 1.0, **setup: int) -> str:
    """A plan of the model in `engine_cases`, at stage 2 on one rank, in float64: weights, gradients and two moments."""
    numel = sum(parameter.numel() for parameter in build().parameters())
    rows = [("parameters", 8), ("gradients", 8), ("masters", 0), ("moments", 16), ("activations", 100)]
    plan = {
        "memory": [{"kind": kind, "tier": "device", "nbytes": int(scale * each * numel)} for kind, each in rows],
        "setup": {"stage": 2, "world_size": 1, "accumulation": 1, "ranks_per_node": 4, **setup},
        "time": {"least": 0.5, "most": 1.0, "binding": "disk read"},
        "bounds": [{"resource": "disk read", "amount": 1.0, "rate": 4e9, "key": "disk.read", "seconds": 1.0}],
    }
    path.write_text(json.dumps(plan))
    return str(path)


@pytest.mark.parametrize(
    ("scale", "setup", "warned"),
    [
        (1.0, {}, ""),
        (0.5, {}, "100% more than the"),
        (1.0, {"stage": 3, "world_size": 8}, "is the plan of another run: stage 3, here 2; world_size 8, here 1"),
    ],
)
def test_a_plan_is_beside_what_is_measured(
    alone: None, tmp_path: Path, scale: float, setup: dict[str, int], warned: str
) -> None:
    plan = _planned(tmp_path / "plan.json", scale, **setup)
    engine = start(2, run_record={"path": str(tmp_path / "record"), "plan": plan})
    train(engine, 0, 4)
    engine.destroy()
    notes = read_run(tmp_path / "record").last.first.notes
    planned = next(note for note in notes if note["note"] == "plan")
    numel = sum(parameter.numel() for parameter in build().parameters())
    assert planned["bytes"] == pytest.approx(scale * 132 * numel, rel=1e-6)
    peaks = [(note["link"], note["bytes_per_second"]) for note in notes if note["note"] == "peak"]
    assert peaks == [("drive in", 1e9)]
    warnings = [note["text"] for note in notes if note["note"] == "warning"]
    assert [warned in text for text in warnings] == ([True] if warned else []), warnings


@pytest.mark.parametrize("content", [None, "{", '{"memory": []}'])
def test_a_plan_that_is_none_is_an_error_that_names_it(alone: None, tmp_path: Path, content: str | None) -> None:
    plan = tmp_path / "plan.json"
    if content is not None:
        plan.write_text(content)
    with pytest.raises(zero_core.UsageError, match="run_record.plan: .*plan.json"):
        start(2, run_record={"path": str(tmp_path / "record"), "plan": str(plan)})


def test_a_resumed_run_goes_on_at_its_step(alone: None, tmp_path: Path) -> None:
    engine = start(2, **recorded(tmp_path / "record"))
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path / "ckpt")
    train(engine, 3, 5)
    engine.destroy()
    engine = start(2, build(seed=1), **recorded(tmp_path / "record"))
    engine.load_checkpoint(tmp_path / "ckpt")
    train(engine, 3, 7)
    engine.destroy()
    run = read_run(tmp_path / "record")
    assert [list(attempt.first.table["first"]) for attempt in run.attempts] == [[1, 2, 3, 4, 5], [4, 5, 6, 7]]
    assert run.replayed == 2


OFF = """
import sys, threading
import torch, zero_core
config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
engine = zero_core.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
threads = [thread.name for thread in threading.enumerate() if "report" in thread.name]
print([name for name in sys.modules if name.startswith("zero_report")], threads)
"""


def test_nothing_is_imported_and_no_thread_runs_when_it_is_off() -> None:
    done = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] []"  # gloo of torch 2.8 prints a line of its own


WITHOUT_IO_URING = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0
import torch, zero_core
tier = {"device": "nvme", "nvme_path": sys.argv[1]}
config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "run_record": {"path": sys.argv[1] + "/record"}}
config["zero_optimization"] = {"stage": 3, "offload_param": tier, "offload_optimizer": tier}
zero_core.initialize(model=torch.nn.Linear(2, 2), config=config)[0].destroy()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of a system call of x86-64")
def test_files_that_move_by_something_slower_than_the_best_are_an_event(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_IO_URING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    notes = read_run(tmp_path / "record").last.first.notes
    texts = [note["text"] for note in notes if note["note"] == "degraded"]
    start = "files are read and written with libaio: io_uring does not run here ("
    assert len(texts) == 1 and texts[0].startswith(start)


class _Reads(nn.Module):
    """A model of tokens, which are given by name or by place; ``mask`` is none."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 4)

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.words(input_ids).square().mean()


def _train_on_tokens(path: str) -> None:
    rank = torch.distributed.get_rank()
    engine = start(3, _Reads(), **recorded(Path(path), gradient_accumulation_steps=2, data_types={}))
    for number in range(4):
        tokens = torch.zeros(2, 5 + rank, dtype=torch.int64)
        engine.backward(engine(tokens) if number % 2 else engine(mask=tokens[0], input_ids=tokens))
        engine.step()
        with torch.no_grad():
            engine(tokens)
    engine.destroy()


def test_tokens_of_all_ranks_are_counted_where_gradients_are(tmp_path: Path) -> None:
    run_ranks(_train_on_tokens, RANKS, str(tmp_path))
    run = read_run(tmp_path)
    assert [list(record.table["tokens"]) for record in run.last.ranks.values()] == [[40, 40], [48, 48]]
    data = page_data(run, analyse(run))
    assert data["totals"]["tokens_per_second"] == pytest.approx(88 / data["totals"]["seconds"])
    assert data["curves"]["tokens"] == [44, 44]  # per step: two micro-batches of 10 and 12


def test_a_record_does_not_keep_an_engine_that_is_dropped(alone: None, tmp_path: Path) -> None:
    engine = start(2, **recorded(tmp_path))
    train(engine, 0, 2)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def test_a_report_without_a_record_says_what_to_write(alone: None) -> None:
    engine = start(0)
    with pytest.raises(zero_core.UsageError, match='"run_record": {"path": "run/record"}'):
        engine.report()
    engine.destroy()


def test_a_failure_is_on_top_of_the_page(alone: None, tmp_path: Path) -> None:
    engine = start(2, **recorded(tmp_path))
    train(engine, 0, 2)
    with pytest.raises(RuntimeError):
        engine(torch.ones(3, 3, dtype=torch.float64), torch.ones(1))
    engine.destroy()
    verdict = analyse(read_run(tmp_path)).verdict
    assert verdict.ended.startswith("Rank 0 failed first: RuntimeError")
    assert write_report(tmp_path).exists()


def test_a_part_whose_measurement_cannot_begin_is_not_under_way(alone: None, tmp_path: Path) -> None:
    class Broken(NoInstruments):
        @contextmanager
        def during(self, part: str) -> Iterator[None]:
            raise RuntimeError("no timer")
            yield

    engine = start(1, **recorded(tmp_path))
    instruments = engine._parts.instruments
    instruments._inner, inner = Broken(), instruments._inner
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no timer"), instruments.during("forward"):
            raise AssertionError("the block ran")
        assert [kind for kind, *_ in instruments.under_way()] == [SpanKind.DATA]
    instruments._inner = inner
    engine.destroy()
