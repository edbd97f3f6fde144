"""A buffer that was given the `.data` of a released weight is named, and what its refusal says to do works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import adamw, build, config, distance, plain, start, train, weights

import zero_core
from zero_comm import run_ranks
from zero_partition import ReleasedParameterError


def shares() -> tuple[str, dict[str, torch.Tensor]]:
    """What the step says, and the weights after the buffer was given a copy instead and two steps were made."""
    engine = start(3)
    module = engine.module
    module.shift.data = module.blocks[0].bias.data
    with pytest.raises(ReleasedParameterError) as refused:
        train(engine, 0, 1)
    with engine.gathered([module.blocks[0].bias]):
        module.shift.data = module.blocks[0].bias.data.clone()
    engine.zero_grad()
    train(engine, 0, 2)
    return str(refused.value), weights(engine)


SKIPS: dict[str, Any] = {"bf16": {"enabled": True, "check_grad_overflow": True}, "data_types": {}}


def test_a_buffer_over_a_released_weight_is_refused_by_both_names() -> None:
    model = build()
    model.shift.data = model.blocks[0].bias.data.clone()
    plain(model, adamw(model), 0, 2)
    for text, trained in run_ranks(shares, 2):
        assert "buffer 'shift' was given the `.data` of parameter 'blocks.0.bias'" in text
        assert distance(trained, weights(model)) <= 1e-12


def skips() -> str:
    """Steps that are not finite would be skipped, for ever."""
    settings = {name: section for name, section in config(3, **SKIPS).items() if section}
    engine = zero_core.initialize(model=build(torch.float32), config=settings)[0]
    engine.module.shift.data = engine.module.blocks[0].bias.data
    with pytest.raises(ReleasedParameterError) as refused:
        train(engine, 0, 1, torch.bfloat16)
    return str(refused.value)


def test_it_is_refused_too_where_steps_that_are_not_finite_are_skipped() -> None:
    assert all("buffer 'shift'" in text for text in run_ranks(skips, 2))
