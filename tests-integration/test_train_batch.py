"""`Engine.train_batch` takes micro-batches through one unit after the other and gives the bits of the ordinary loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from train_batch_runs import MICRO_BATCHES, MODELS, Case, Net, batches, config, encoder_decoder, facts, trained

import zero_core
from zero_comm import run_ranks
from zero_partition.micro_batch_threads import GeneratorStates


def compared(cases: list[Case], folder: str) -> list[tuple[Case, list[str]]]:
    """By case: what differs between the ordinary loop and `train_batch`."""
    found = []
    for case in cases:
        loop, batch = trained(case, folder, False), trained(case, folder, True)
        same = [loop[0] == batch[0], loop[2:] == batch[2:]]
        wrong = [f"losses {loop[0]} {batch[0]}", f"norm {loop[2:]} {batch[2:]}"]
        differing = [word for word, equal in zip(wrong, same, strict=True) if not equal]
        found.append((case, differing + [name for name, value in loop[1].items() if batch[1][name] != value]))
    return found


CASES = [
    *(Case(model) for model in MODELS),
    *(Case(model, dtype) for model in ("net", "llama", "tied llama") for dtype in ("bf16", "fp16")),
    *(Case(model, "bf16", tier) for model in ("net", "tied llama") for tier in ("cpu", "nvme")),
    *(Case("net", tier="nvme", inputs=tier) for tier in ("cpu", "nvme")),
    Case("net", "bf16", "cpu", overlap="exact"),
    Case("net", stage=2),
    Case("net", "bf16", "cpu", 1),
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_and_moments_are_those_of_the_ordinary_loop(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    of_one = [case for case in CASES if case.tier == "nvme"]  # one rank releases only these
    cases = {1: [*of_one, *(Case(model, tier="nvme") for model in MODELS)], 2: CASES, 3: CASES[:6]}[ranks]
    for found in run_ranks(compared, ranks, cases, str(tmp_path), timeout=300):
        assert [(case, wrong) for case, wrong in found if wrong] == []


def inexact(folder: str) -> list[tuple[float, float]]:
    """By step, the losses of the ordinary loop and of `train_batch` for an encoder whose output every block reads."""
    MODELS["encoder and decoder"] = encoder_decoder
    loop, batch = (trained(Case("encoder and decoder", tier="nvme"), folder, way) for way in (False, True))
    return list(zip(loop[0], batch[0], strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_that_several_modules_read_twice_is_summed_in_another_order(ranks: int, tmp_path: Path) -> None:
    for loop, batch in run_ranks(inexact, ranks, str(tmp_path))[0]:
        assert loop == pytest.approx(batch, rel=1e-5)


def dropped(folder: str, unit_by_unit: bool) -> tuple[dict[str, bytes], bytes]:
    """Three steps with dropout; in the ordinary loop each micro-batch gets the generators that `train_batch` gives."""
    engine = zero_core.initialize(model=Net(drop=0.3), config=config(Case("net", tier="nvme"), folder))[0]
    torch.manual_seed(7 + dist.get_rank())
    for step in range(3):
        if unit_by_unit:
            engine.train_batch(batches(step))
            continue
        streams = [GeneratorStates(torch.device("cpu")) for _ in range(MICRO_BATCHES)]
        for number in range(1, MICRO_BATCHES):
            streams[number].fork(number)
        for stream, ids in zip(streams, batches(step), strict=True):
            with stream.in_force():
                engine.backward(engine(ids))
            engine.step()
        streams[0].install()
    found = facts(engine), torch.get_rng_state().numpy().tobytes()
    engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_dropout_draws_what_each_micro_batch_draws_alone(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(dropped, ranks, str(tmp_path), True) == run_ranks(dropped, ranks, str(tmp_path), False)


def gathered_bytes(unit_by_unit: bool) -> list[int]:
    """The bytes that this rank sends for gathers, by step."""
    engine = zero_core.initialize(model=Net(), config=config(Case("net"), ""))[0]
    found = []
    for step in range(4):
        before = engine.ledger.sent_bytes("gather")
        if unit_by_unit:
            engine.train_batch(batches(step))
        else:
            for ids in batches(step):
                engine.backward(engine(ids))
                engine.step()
        found.append(engine.ledger.sent_bytes("gather") - before)
    full = sum(unit.layout.numel for unit in engine.partition.units) * 4
    head = next(unit for unit in engine.partition.units if unit.name.startswith("head")).layout.numel * 4
    engine.destroy(unshard=False)
    return [*found, full, head]


def test_a_unit_is_gathered_twice_a_step_and_the_last_one_once() -> None:
    *batch, full, head = run_ranks(gathered_bytes, 2, True)[0]
    *loop, _, _ = run_ranks(gathered_bytes, 2, False)[0]
    assert batch == [(2 * full - head) // 2] * 4
    assert loop[-1] >= MICRO_BATCHES * batch[-1]
