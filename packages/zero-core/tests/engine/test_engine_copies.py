"""Copies of an engine and of its model: what works, and what is refused by name."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from engine_cases import distance, outcome, start, train, weights

from zero_comm import run_ranks


def tried(stages: tuple[int, ...]) -> list[dict[str, str]]:
    found = []
    for stage in stages:
        engine = start(stage)
        train(engine, 0, 1)
        found.append(
            {
                "deepcopy": outcome(lambda engine=engine: copy.deepcopy(engine)),
                "inside": outcome(lambda engine=engine: copy.deepcopy({"teacher": [engine]})),
                "pickle": outcome(lambda engine=engine: pickle.dumps(engine)),
                "save": outcome(lambda engine=engine: torch.save({"engine": engine}, io.BytesIO())),
            }
        )
        copied = copy.deepcopy(engine.module)
        alias: Any = copy.copy(engine)
        train(alias, 1, 2)
        assert distance(weights(engine), weights(copied)) > 0
        assert distance(weights(engine), weights(alias)) == 0
        engine.destroy()
    return found


@pytest.mark.parametrize(("world_size", "stages"), [(1, (0, 1)), (2, (1, 2, 3))])
def test_copies_and_pickles_of_an_engine_say_what_to_do_instead(world_size: int, stages: tuple[int, ...]) -> None:
    for answers in run_ranks(tried, world_size, stages):
        for refusals in answers:
            for call in ("deepcopy", "inside"):
                assert "UsageError" in refusals[call] and "copy.deepcopy(engine.module)" in refusals[call]
            for call in ("pickle", "save"):
                assert "UsageError" in refusals[call] and "engine.save_checkpoint" in refusals[call]
