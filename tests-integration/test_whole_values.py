"""Whole parameters, gradients and states can be read and replaced at every stage."""

from __future__ import annotations

import pytest
import torch
import training
import zoo
from training import Run

from zero_comm import run_ranks


def replaced(stage: int, dtype: str) -> list[bool]:
    engine = training.start(Run(dtype=dtype), stage)
    parameter = engine.module.blocks[1].up.weight
    training.train(engine, Run(), 0, 1)
    value = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape) / 8
    answers = []
    engine.set_full_param(parameter, value)
    answers.append(torch.equal(engine.full_param(parameter).float(), value))
    with engine.gathered(parameter):
        answers.append(torch.equal(parameter.float(), value.to(parameter.dtype).float()))
    engine.set_full_state(parameter, "exp_avg", value)
    answers.append(torch.equal(engine.full_state(parameter, "exp_avg").float(), value))
    engine.backward(engine(*zoo.batch(1, 0, 0, 1))[0])
    engine.set_full_grad(parameter, value)
    gradient = engine.full_grad(parameter)
    answers.append(gradient is not None and torch.equal(gradient.float(), value))
    engine.step()
    norm = engine.get_global_grad_norm()
    answers.append(norm is not None and norm >= float(value.norm()) * 0.999)
    return answers


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_whole_values_are_what_was_set(stage: int, dtype: str) -> None:
    for answers in run_ranks(replaced, 2, stage, dtype):
        assert answers == [True] * 5
