"""A buffer that was given the `.data` of a released weight is named, and what its refusal says to do works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import adamw, batch, build, config, distance, plain, start, train, weights

import zero_core
from zero_comm import run_ranks
from zero_partition import PartitionError, ReleasedParameterError


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


def evaluates() -> str:
    engine = start(3)
    engine.module.shift.data = engine.module.blocks[0].bias.data
    with torch.no_grad(), pytest.raises(ReleasedParameterError) as refused:
        engine(*batch(0))
    return str(refused.value)


def test_it_is_refused_too_by_a_forward_without_gradients() -> None:
    for text in run_ranks(evaluates, 2):
        assert "buffer 'shift' was given the `.data` of parameter 'blocks.0.bias'" in text


def registered_in_a_block(stage: int) -> tuple[str, dict[str, torch.Tensor]]:
    """What leaving the block says, and the weights after the buffer was given a copy and two steps were made."""
    engine, message = start(stage), ""
    module = engine.module
    try:
        with engine.gathered([module.blocks[0].bias]):
            module.shift.data = module.blocks[0].bias.data
    except PartitionError as refused:
        message = str(refused)
    with engine.gathered([module.blocks[0].bias]):
        module.shift.data = module.blocks[0].bias.data.clone()
    train(engine, 0, 2)
    return message, weights(engine)


def test_a_buffer_over_a_gathered_weight_is_refused_where_the_block_ends() -> None:
    model = build()
    model.shift.data = model.blocks[0].bias.data.clone()
    plain(model, adamw(model), 0, 2)
    for text, trained in run_ranks(registered_in_a_block, 2, 3):
        assert "buffer 'shift' lies in the memory of parameter 'blocks.0.bias'" in text
        assert distance(trained, weights(model)) <= 1e-12


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
