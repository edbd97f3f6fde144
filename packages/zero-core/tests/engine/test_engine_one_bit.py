"""The 1-bit optimizers through the engine, against their papers' algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from one_bit_cases import CASES, COMMON, ORACLES, build, flat, loss, sizes, start, train
from torch import nn

import zero_core
from zero_comm import run_ranks
from zero_optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from zero_partition import PartitionError
from zero_settings import ConfigError

NAMES = sorted(CASES)


def trained(name: str) -> tuple[list[torch.Tensor], list[int]]:
    """Weights after each step, and the bytes that each sent for gradients or their substitute."""
    engine = start(name)
    weights, sent = [], []
    for step in range(CASES[name][1]):
        engine.ledger.reset()
        weights += train(engine, step, step + 1)
        sent.append(engine.ledger.sent_bytes("reduce"))
    return weights, sent


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_the_papers_and_the_ranks_agree(name: str, world_size: int) -> None:
    runs = run_ranks(trained, world_size, name)
    parameters, steps = CASES[name]
    expected = list(ORACLES[name](world_size, steps, **parameters))
    for step, weights in enumerate(expected):
        got = [weights_of[step] for weights_of, _ in runs]
        if weights is None:
            assert world_size == 1 or not torch.equal(got[0], got[1])
        else:
            assert all(torch.equal(other, got[0]) for other in got)
            torch.testing.assert_close(got[0], weights, rtol=1e-4, atol=2e-6)


def test_compressed_steps_send_one_bit_per_element_and_a_scale_for_512() -> None:
    numel = sum(sizes())
    size = -(-numel // 2)
    packet = -(-size // 32) * 4 + -(-size // 512) * 4
    for _, sent in run_ranks(trained, 2, "OneBitAdam"):
        whole, compressed = sent[0], 2 * packet
        assert 8 * size <= whole < 9 * size and sent == [whole] * 3 + [compressed] * 5
    for _, sent in run_ranks(trained, 2, "ZeroOneAdam"):
        assert sent[:6] == [whole, whole, compressed, whole, compressed, whole]
        assert sent[6:] == [compressed] * 4 + [0, compressed] + [0, compressed] + [0, 0, 0, compressed]


def resumed(name: str, folder: str, half: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    engine, end = start(name), CASES[name][1]
    train(engine, 0, half)
    engine.save_checkpoint(folder)
    went_on = train(engine, half, end)
    engine.destroy()
    again = start(name)
    with torch.no_grad():
        for p in again.module.parameters():
            p.zero_()
    again.load_checkpoint(folder)
    assert not again.load_report.ignored and not again.load_report.defaulted
    return went_on, train(again, half, end)


@pytest.mark.parametrize(
    ("name", "half"), [("OneBitAdam", 2), ("OneBitAdam", 5), ("OneBitLamb", 6), ("ZeroOneAdam", 15)]
)
def test_a_resumed_run_goes_on_bitwise(name: str, half: int, tmp_path: Path) -> None:
    for went_on, again in run_ranks(resumed, 2, name, str(tmp_path), half):
        assert all(torch.equal(a, b) for a, b in zip(went_on, again, strict=True))


def saved(folder: str) -> None:
    engine = start("OneBitAdam")
    train(engine, 0, 5)
    engine.save_checkpoint(folder)


def loaded(folder: str) -> float:
    engine = start("OneBitAdam")
    engine.load_checkpoint(folder)
    assert engine.optimizer.steps == 5 and not engine.optimizer.rank_state()
    train(engine, 5, 8)
    return float(loss(engine, 0, 99))


def test_another_number_of_ranks_loads_the_state_and_forgets_the_errors(tmp_path: Path) -> None:
    run_ranks(saved, 2, str(tmp_path))
    losses = run_ranks(loaded, 3, str(tmp_path))
    assert losses[0] == losses[1] == losses[2] < 2.0


def test_with_one_rank_and_a_late_freeze_1_bit_adam_is_adamw(alone: None) -> None:
    engine, reference = start("OneBitAdam"), build()
    engine.optimizer.freeze_step = 100
    optimizer = torch.optim.AdamW(reference.parameters(), **{**COMMON, "betas": (0.9, 0.99)})
    for step in range(4):
        optimizer.zero_grad()
        loss(reference, 0, step).backward()
        optimizer.step()
    torch.testing.assert_close(train(engine, 0, 4)[-1], flat(reference.parameters()), rtol=1e-6, atol=1e-8)


class Rare(nn.Module):
    """A table of which only the first rows are ever used before the freeze."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(rows))


def rare_rows() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 3}},
    }
    engine = zero_core.initialize(model=Rare(), config=settings, device="cpu")[0]
    before = engine.module.table.weight.detach().clone()
    for step in range(12):
        engine.backward(engine(torch.arange(4) + (step % 2)).square().mean())
        engine.step()
    return before, engine.module.table.weight.detach().clone()


def test_rows_without_a_gradient_before_the_freeze_stay_where_they_are() -> None:
    for before, after in run_ranks(rare_rows, 2):
        assert torch.equal(after[5:], before[5:]) and not torch.equal(after[:5], before[:5])
        assert bool(after.isfinite().all()) and (after - before).abs().max() < 0.5


def clipped(limit: float) -> tuple[float, float]:
    """The norm of the last step, and the length of the last move."""
    engine = start("OneBitAdam", gradient_clipping=limit)
    weights = train(engine, 0, 5)
    return engine.get_global_grad_norm(), float((weights[-1] - weights[-2]).norm())


def test_ranks_clip_alike_by_the_mean_of_their_norms() -> None:
    answers = run_ranks(clipped, 2, 0.05)
    assert answers[0] == answers[1] and answers[0][0] > 0.05


def overflowing() -> tuple[bool, list[bool]]:
    engine = start("OneBitAdam", fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    taken = []
    for step in range(6):
        x = torch.full(
            (8, 20), torch.inf if step == 4 and torch.distributed.get_rank() == 1 else 0.1, dtype=torch.float16
        )
        engine.backward(engine(x).float().square().mean())
        engine.step()
        taken.append(engine.was_step_applied())
    return bool(flat(engine.module.parameters()).isfinite().all()), taken


def test_an_overflow_on_one_rank_skips_a_compressed_step_on_all() -> None:
    assert run_ranks(overflowing, 2) == [(True, [True] * 4 + [False, True])] * 2


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage: expected stage 0"),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device",
        ),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"freeze_steps": 3}}},
            "freeze_step",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(sections: dict[str, Any], expected: str, alone: None) -> None:
    with pytest.raises(ConfigError, match=expected):
        start("OneBitAdam", **sections)


@pytest.mark.parametrize("key", ["amsgrad", "eps_inside_sqrt", "max_grad_norm"])
@pytest.mark.parametrize("name", NAMES)
def test_variants_that_do_not_exist_are_refused_by_name(name: str, key: str, alone: None) -> None:
    value = 1.0 if key == "max_grad_norm" else True
    with pytest.raises(zero_core.UsageError, match=key):
        start(name, optimizer={"type": name, "params": {key: value}})


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_an_optimizer_object_is_refused_above_stage_0(kind: Any, alone: None) -> None:
    model = build()
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    with pytest.raises(PartitionError, match=f"{kind.__name__} averages over the ranks by itself"):
        zero_core.initialize(model=model, optimizer=kind(model.parameters()), config=settings, device="cpu")
