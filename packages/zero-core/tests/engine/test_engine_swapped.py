"""Parameters that ``torch.utils.swap_tensors`` swapped have lost the engine's hooks: refused by name."""

from __future__ import annotations

import pytest
import torch
from engine_cases import outcome, start, train

from zero_comm import run_ranks


def swapped(stages: tuple[int, ...]) -> list[tuple[str, str, str]]:
    found = []
    for stage in stages:
        for steps in (0, 1):
            engine = start(stage)
            train(engine, 0, steps)
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                engine.module.blocks[0].to(torch.float64)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
            first = outcome(lambda engine=engine: train(engine, 1, 2))
            engine.zero_grad()
            again = outcome(lambda engine=engine: train(engine, 1, 2))
            found.append((first, again, outcome(engine.destroy)))
    return found


@pytest.mark.parametrize(("world_size", "stages"), [(1, (0, 1)), (2, (3,)), (3, (2,))])
def test_a_swapped_parameter_is_refused_by_name(world_size: int, stages: tuple[int, ...]) -> None:
    for answers in run_ranks(swapped, world_size, stages):
        for first, again, end in answers:
            for refusal in (first, again):
                assert "EditRefusedError: parameter 'blocks.0.weight' was swapped" in refusal
            assert end == "no error"


def swapped_with_each_other(stages: tuple[int, ...]) -> list[tuple[str, str]]:
    found = []
    for stage in stages:
        engine = start(stage)
        train(engine, 0, 1)
        first, second = engine.module.blocks[0].weight, engine.module.blocks[1].weight
        with engine.gathered([first, second], modifier_rank=0):
            torch.utils.swap_tensors(first, second)
        found.append((outcome(lambda engine=engine: train(engine, 1, 2)), outcome(engine.destroy)))
    return found


@pytest.mark.parametrize(("world_size", "stages"), [(1, (0,)), (2, (0, 1, 3)), (3, (2,))])
def test_parameters_of_a_model_that_were_swapped_with_each_other_are_refused_by_name(
    world_size: int, stages: tuple[int, ...]
) -> None:
    for answers in run_ranks(swapped_with_each_other, world_size, stages):
        for refusal, end in answers:
            assert "EditRefusedError: parameter 'blocks." in refusal and "was swapped" in refusal
            assert "initialize again" in refusal and "on every rank, or" not in refusal
            assert end == "no error"
