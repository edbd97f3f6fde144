"""Messages between ranks come out of JSON as they went in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zero_partition.messages import (
    Completion,
    LockStep,
    ModelFacts,
    Observations,
    PassProgress,
    ReductionsSeen,
    StepReport,
    TensorFacts,
    WrittenGradients,
    decode_each,
    distinct,
)

MESSAGES = [
    LockStep(3, 5, 2, False),
    PassProgress(gathers=4, reductions=1),
    Observations(),
    Observations(
        gathers={"backward": [2, 0]},
        reductions=ReductionsSeen([Completion(2, 1), Completion(0, 2)], [2, 0], steady=False),
        changed=[1],
        edits={"0.1": "!was cast"},
        discards=77,
    ),
    WrittenGradients(),
    WrittenGradients({3: [0, 2]}, {1: 1 << 60}),
    StepReport([1], [0.5, 0.25], {2: [0]}, "a.weight", WrittenGradients({0: [1]}), True, 7),
    StepReport([], [0.5], {}, "", WrittenGradients(), False, 7, added=9),
    StepReport([], [0.5], {}, "", WrittenGradients(), False, 7, True, 0.0),
    StepReport([], [0.5], {}, "", WrittenGradients(), False, 7, frozen=5),
    ModelFacts([TensorFacts("a.weight", [2, 3], "torch.float32", True)], on_meta=None),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_decode_gives_what_encode_took(message: Any) -> None:
    assert type(message).decode(json.loads(json.dumps(message.encode()))) == message


def test_what_an_ordinary_step_says_of_the_users_gradients_is_nothing() -> None:
    assert WrittenGradients().encode() == []


def test_a_model_fact_reads_as_a_sentence_for_errors() -> None:
    assert (
        str(TensorFacts("a.b", [2, 3], "torch.float32", False)) == "'a.b' of shape [2, 3], torch.float32, not trained"
    )


def test_what_several_ranks_said_alike_is_decoded_once_and_stands_for_each_of_them() -> None:
    same, other = LockStep(3, 5, 2, False).encode(), LockStep(4, 5, 2, False).encode()
    decoded: list[Any] = []

    def decode(data: Any) -> LockStep:
        decoded.append(data)
        return LockStep.decode(data)

    found = decode_each(decode, [same, other, same, same])
    assert [one.gather for one in found] == [3, 4, 3, 3] and decoded == [same, other]
    assert [one.gather for one in distinct(found)] == [3, 4]
