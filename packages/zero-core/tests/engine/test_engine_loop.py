"""The training loop: the example as a user types it, accumulation, boundaries, no_sync, zero_grad."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    BATCH,
    RANKS,
    STAGES,
    WIDE,
    adamw,
    batch,
    build,
    config,
    distance,
    outcome,
    plain,
    start,
    train,
    weights,
)

import zero_core
from zero_comm import run_ranks


def users_script(folder: str) -> dict[str, Any]:
    model = build(width=WIDE)
    data = [batch(number) for number in range(6)]
    engine, optimizer, loader, scheduler = zero_core.initialize(
        model=model, config=f"{folder}/ds.json", model_parameters=model.parameters()
    )
    losses = []
    for x, y in data:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.save_checkpoint(f"{folder}/run/ckpt")  # tag global_step{N}, and `latest`
    path, client_state = engine.load_checkpoint(f"{folder}/run/ckpt")
    return {
        "losses": losses,
        "weights": weights(engine),
        "path": path,
        "client_state": client_state,
        "returned": (type(optimizer).__name__, loader, scheduler),
        "same": engine.module is model and engine.optimizer is optimizer,
        "steps": (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_the_example_as_a_user_types_it(stage: int, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**config(stage), "train_micro_batch_size_per_gpu": BATCH // RANKS}))
    first, second = run_ranks(users_script, RANKS, str(tmp_path))
    reference = build(width=WIDE)
    plain(reference, adamw(reference), 0, 6)
    assert distance(first["weights"], weights(reference)) <= 1e-12
    assert first["returned"] == ("CPUAdamW", None, None) and first["same"] and second["same"]
    assert first["steps"] == (6, 6, 6 * BATCH, 0)
    assert first["client_state"] == {} and Path(first["path"]) == tmp_path / "run/ckpt/global_step6"
    assert (tmp_path / "run/ckpt/latest").read_text().strip() == "global_step6"


def accumulate(stage: int) -> dict[str, Any]:
    engine = start(stage, gradient_accumulation_steps=3)
    boundaries, divided, moved, counters = [], [], [], []
    for number in range(6):
        before = weights(engine)
        loss = engine(*batch(number))
        boundaries.append(engine.is_gradient_accumulation_boundary())
        divided.append((engine.backward(loss) * 3 - loss).item())
        engine.step()
        moved.append(distance(before, weights(engine)) > 0)
        counters.append((engine.global_steps, engine.micro_steps, engine.global_samples))
    return {"boundaries": boundaries, "divided": divided, "moved": moved, "counters": counters, "end": weights(engine)}


@pytest.mark.parametrize("stage", STAGES)
def test_weights_move_at_the_boundary_of_accumulation_only(stage: int) -> None:
    for seen in run_ranks(accumulate, RANKS, stage):
        assert seen["boundaries"] == seen["moved"] == [False, False, True] * 2
        assert max(map(abs, seen["divided"])) <= 1e-12
        assert seen["counters"] == [(i // 3, i, i * BATCH) for i in range(1, 7)]
    reference = build()
    plain(reference, adamw(reference), 0, 2, accumulation=3)
    assert distance(seen["end"], weights(reference)) <= 1e-12


def own_boundaries(stage: int, scaled: bool) -> dict[str, torch.Tensor]:
    engine = start(stage, gradient_accumulation_steps=1 if scaled else 3)
    for step in range(2):
        for micro, is_last in enumerate((False, False, True)):
            engine.set_gradient_accumulation_boundary(is_last)
            assert engine.is_gradient_accumulation_boundary() is is_last
            engine.backward(engine(*batch(3 * step + micro)) / 3, scale_wrt_gas=scaled)
            engine.step()
    assert engine.global_steps == 2
    return weights(engine)


@pytest.mark.parametrize(("stage", "scaled"), [(0, True), (1, False), (2, True), (3, False)])
def test_a_user_may_decide_the_boundaries_and_the_divisor(stage: int, scaled: bool) -> None:
    reference = build()
    plain(reference, adamw(reference), 0, 2, accumulation=3)
    assert distance(run_ranks(own_boundaries, RANKS, stage, scaled)[0], weights(reference)) <= 1e-12


def without_sync(stage: int) -> Any:
    engine = start(stage)

    def sent() -> int:
        return engine.ledger.sent_bytes("reduce")

    def enter() -> None:
        with engine.no_sync():
            raise AssertionError("no_sync opened")

    if stage >= 2:
        return outcome(enter), train(engine, 0, 1)
    quiet = []
    for step in range(2):
        before = sent()
        with engine.no_sync():
            engine.backward(engine(*batch(2 * step)) / 2)
        quiet.append(sent() == before)
        engine.backward(engine(*batch(2 * step + 1)) / 2)
        quiet.append(sent() > before)
        engine.step()
    return quiet, weights(engine)


@pytest.mark.parametrize("stage", (0, 1))
def test_no_sync_adds_up_without_sending(stage: int) -> None:
    quiet, end = run_ranks(without_sync, RANKS, stage)[0]
    assert all(quiet)
    reference = build()
    plain(reference, adamw(reference), 0, 2, accumulation=2)
    assert distance(end, weights(reference)) <= 1e-12


@pytest.mark.parametrize("stage", (2, 3))
def test_no_sync_is_refused_where_gradients_are_sharded_and_nothing_breaks(stage: int) -> None:
    for refusal, losses in run_ranks(without_sync, RANKS, stage):
        assert refusal.startswith("UsageError") and f"stage {stage}" in refusal and len(losses) == 1
        assert "gradient_accumulation_steps" in refusal


def forget_gradients(stage: int) -> dict[str, torch.Tensor]:
    engine = start(stage)
    engine.backward(engine(*batch(7)))
    engine.zero_grad()
    train(engine, 0, 2)
    return weights(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_forgets_what_was_collected(stage: int) -> None:
    reference = build()
    plain(reference, adamw(reference), 0, 2)
    assert distance(run_ranks(forget_gradients, RANKS, stage)[0], weights(reference)) <= 1e-12


def plain_backward(stage: int) -> dict[str, torch.Tensor]:
    engine = start(stage)
    for number in range(3):
        engine(*batch(number)).backward()
        engine.step()
    return weights(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_plain_backward_calls_train_too(stage: int) -> None:
    reference = build()
    plain(reference, adamw(reference), 0, 3)
    assert distance(run_ranks(plain_backward, RANKS, stage)[0], weights(reference)) <= 1e-12


def refused_losses() -> list[str]:
    engine = start(3)
    messages = [
        outcome(lambda: engine.backward(torch.ones(2, requires_grad=True))),
        outcome(lambda: engine.backward(torch.tensor(1.0))),
        outcome(lambda: engine.backward(1.0)),  # type: ignore[arg-type]
    ]
    train(engine, 0, 1)
    return messages


def test_a_loss_that_cannot_be_differentiated_is_refused_by_shape_and_the_engine_goes_on() -> None:
    for messages in run_ranks(refused_losses, RANKS):
        assert all(message.startswith("UsageError: engine.backward") for message in messages)
        assert "(2,)" in messages[0] and "requires_grad=False" in messages[1] and "float" in messages[2]


def test_the_engine_prints_nothing_unless_asked(alone: None, capsys: Any) -> None:
    train(start(1), 0, 2)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def _watching_after_an_engine_was_dropped() -> int:
    others = set(threading.enumerate())  # of engines of other tests, whose failed graphs may keep them alive
    engine = start(1)
    train(engine, 0, 1)
    del engine
    gc.collect()
    watches = [thread for thread in threading.enumerate() if thread.name == "zero-watch" and thread not in others]
    for watch in watches:
        watch.join(30)
    return sum(watch.is_alive() for watch in watches)


def test_an_engine_that_is_dropped_leaves_no_thread_behind() -> None:
    assert run_ranks(_watching_after_an_engine_was_dropped, RANKS) == [0] * RANKS
