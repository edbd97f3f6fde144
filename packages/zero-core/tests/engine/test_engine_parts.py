"""The engine and its parts: who holds whom."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator

import pytest
from engine_cases import BATCH, config, start, train
from torch import nn

import zero_core
from zero_core.delegation import Delegated
from zero_core.state import BatchSizes
from zero_settings import Config


def held(thing: object, seen: dict[int, object]) -> Iterator[object]:
    """Everything that an object of this project reaches through its attributes, containers included."""
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    yield thing
    own = type(thing).__module__.split(".")[0] in ("zero_core", "zero_partition", "zero_offload", "zero_ckpt")
    if own or isinstance(thing, (dict, list, tuple, set)):
        for inner in gc.get_referents(thing):
            if not isinstance(inner, (type, nn.Parameter)):
                yield from held(inner, seen)


def test_no_part_holds_the_engine_and_the_engine_is_one_class(alone: None) -> None:
    engine = start(3, audit_every=2, steps_per_print=1)
    train(engine, 0, 2)
    own = [kind for kind in zero_core.Engine.__mro__ if kind.__module__.startswith("zero_")]
    assert own == [zero_core.Engine]
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine.training_state.module = nn.Identity()  # type: ignore[misc]
    for name, part in vars(engine._parts).items():
        assert not any(one is engine for one in held(part, {})), name


def test_what_is_assigned_to_the_engine_reaches_its_parts(alone: None) -> None:
    engine, calls = start(1), []

    class Counting:
        def loss(self, loss: object) -> None:
            calls.append("loss")

        def before_step(self) -> None:
            calls.append("before")

        def after_step(self, result: object) -> None:
            calls.append("after")

    engine.observer, engine.global_steps = Counting(), 5
    train(engine, 0, 1)
    assert calls == ["loss", "before", "after"]
    assert engine.global_steps == engine.training_state.counters.global_steps == 6
    assert isinstance(vars(zero_core.Engine)["global_steps"], Delegated)


def test_batch_sizes_follow_from_one_another() -> None:
    sizes = BatchSizes(Config.load(config(1), world_size=1))
    sizes.set_train(3 * BATCH)
    assert (sizes.train, sizes.micro, sizes.steps) == (3 * BATCH, BATCH, 3)
    sizes.set_micro(2)
    assert (sizes.train, sizes.micro, sizes.steps) == (6, 2, 3)
    for call, wrong in ((sizes.set_train, 5), (sizes.set_micro, 0)):
        with pytest.raises(zero_core.UsageError, match=f"got {wrong}"):
            call(wrong)
