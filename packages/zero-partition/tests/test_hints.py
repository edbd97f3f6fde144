"""Steps that a training script probably did not mean are refused, or said once."""

from __future__ import annotations

import logging

import pytest
import torch
from partition_models import Stack, cut, tokens
from torch import nn

from zero_comm import run_ranks
from zero_partition import PartitionError, ShardedOptimizer


def warnings_of_a_careless_script() -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_partition").addHandler(handler)
    model = Stack()
    parts = cut(model, 3)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    model(tokens()).backward()
    optimizer.step()
    assert not texts, texts
    for _ in range(2):
        optimizer.step()
        model.state_dict()
    return texts


def test_a_step_without_gradients_and_a_state_dict_without_values_are_said_once_on_rank_0() -> None:
    told, silent = run_ranks(warnings_of_a_careless_script, 2)
    step, state = told
    assert "no parameter has a gradient on any rank" in step and "backward(loss)" in step
    assert "'embedding.weight' is sharded and not gathered" in state and "save_checkpoint" in state
    assert silent == []


@pytest.mark.parametrize("where", ["model", "part"])
def test_a_model_in_a_wrapper_that_averages_gradients_is_refused(where: str) -> None:
    wrapped: nn.Module = nn.DataParallel(nn.Linear(4, 4))
    name = "the model" if where == "model" else "'0'"
    with pytest.raises(PartitionError, match=f"{name} is wrapped in DataParallel.*`.module`"):
        cut(wrapped if where == "model" else nn.Sequential(wrapped), 1)
