"""`Engine.train_batch` with models and micro-batches as users have them: the bits of the ordinary loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from train_batch_models import TRIALS
from train_batch_runs import MICRO_BATCHES, Case, config, facts

import zero_core
from zero_comm import run_ranks
from zero_partition.micro_batch_threads import GeneratorStates
from zero_partition.micro_batches import call_model


def trained(name: str, case: Case, folder: str, unit_by_unit: bool) -> tuple[list[float], dict[str, bytes], Any]:
    """Losses, facts and the gradient norm of two steps. In the ordinary loop each micro-batch draws from the generators
    that `train_batch` gives it."""
    trial = TRIALS[name]
    engine = zero_core.initialize(model=trial.build(), config=config(case, folder, **trial.keys))[0]
    torch.manual_seed(11 + dist.get_rank())
    losses = []
    for step in range(2):
        given = trial.given(step)
        if unit_by_unit:
            losses.append(float(engine.train_batch(given, trial.loss)))
            continue
        streams = [GeneratorStates(torch.device("cpu")) for _ in range(MICRO_BATCHES)]
        for number in range(1, MICRO_BATCHES):
            streams[number].fork(number)
        total = torch.zeros(())
        for stream, batch in zip(streams, given, strict=True):
            with stream.in_force():
                total = total + engine.backward(trial.loss(call_model(engine, batch), batch))
            engine.step()
        streams[0].install()
        losses.append(float(total))
    found = losses, facts(engine), engine.get_global_grad_norm()
    engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize(("ranks", "tier"), [(1, "nvme"), (2, "none")])
def test_weights_and_moments_are_those_of_the_ordinary_loop(ranks: int, tier: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    case = Case(name, tier=tier)
    loop, by_unit = (run_ranks(trained, ranks, name, case, str(tmp_path), way) for way in (False, True))
    for ours, theirs in zip(by_unit, loop, strict=True):
        assert (ours[0], ours[2]) == (theirs[0], theirs[2])
        assert [key for key, value in theirs[1].items() if ours[1][key] != value] == []
