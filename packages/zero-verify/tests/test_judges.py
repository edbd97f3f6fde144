"""What judges say of values that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from zero_verify import Bitwise, Within
from zero_verify.recording import GRADIENT, Step


class Held(Step):
    """A step whose one tensor is in memory."""

    def __init__(self, *values: float) -> None:
        self._values = torch.tensor(values)

    def names(self, kind: str) -> list[str]:
        return ["head.weight"]

    def tensor(self, kind: str, name: str) -> torch.Tensor:
        return self._values


@pytest.mark.parametrize("judge", [Bitwise(), Within(0.01)], ids=["bitwise", "within"])
def test_scalars_that_are_not_finite_are_equal_to_their_like_only(judge: Bitwise | Within) -> None:
    for value in (math.nan, math.inf, -math.inf):
        assert judge.loss(0, value, value) == judge.norm(0, value, value) == ""
        for other in (1.0, math.nan, math.inf, -math.inf):
            if str(other) != str(value):
                assert f"expected {value}, got {other}" in judge.loss(0, value, other)
                assert f"expected {other}, got {value}" in judge.norm(0, other, value)


def test_elements_that_are_not_finite_in_both_do_not_hide_or_make_a_difference() -> None:
    judge, reference = Within(0.01), Held(1.0, math.nan, math.inf, 1.0)
    assert not list(judge.tensors(0, GRADIENT, reference, Held(1.0, math.nan, math.inf, 1.001)))
    for got in (Held(1.0, math.nan, math.inf, 2.0), Held(1.0, 1.0, math.inf, 1.0), Held(1.0, math.nan, -math.inf, 1.0)):
        ((name, detail),) = judge.tensors(0, GRADIENT, reference, got)
        assert name == "head.weight" and "root mean square" in detail
