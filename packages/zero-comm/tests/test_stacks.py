"""Failures are described with the line of the user's code that they come from."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from zero_comm import Tag
from zero_comm.stacks import describe_failure, excused_exceptions, failed_backward


def raised(code: str) -> str:
    try:
        exec(compile(code, "/somewhere/train.py", "exec"), {"torch": torch, "Tag": Tag})
    except Exception as failure:
        return describe_failure(failure, "in step 3")
    return "nothing"


def test_the_last_line_of_the_user_s_code_is_named() -> None:
    assert raised("def f():\n  1 / 0\nf()") == "ZeroDivisionError: division by zero (in step 3, at train.py:2)"
    assert raised("1\nTag()").endswith("(in step 3, at train.py:2)")
    inside_torch = raised("\n\ntorch.nn.Linear(2, 2)(torch.ones(3))")
    assert inside_torch.startswith("RuntimeError: ") and inside_torch.endswith("(in step 3, at train.py:3)")


def test_an_exception_that_was_not_raised_has_no_line() -> None:
    assert describe_failure(ValueError("no luck")) == "ValueError: no luck"
    assert describe_failure(ValueError("no luck"), "in step 3") == "ValueError: no luck (in step 3)"


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no luck")


def backward() -> None:
    Broken.apply(torch.ones((), requires_grad=True)).backward()


def again() -> None:
    try:
        backward()
    except ArithmeticError as failure:
        raise OSError("what came of it") from failure


def test_a_failed_backward_is_found_while_it_or_what_came_of_it_is_handled() -> None:
    found = []
    for call in (backward, again):
        try:
            call()
        except Exception as handled:
            seen = failed_backward()
            assert seen is not None and seen[0] is handled and isinstance(seen[1], ArithmeticError)
            assert id(handled) in excused_exceptions()
            try:
                raise KeyError("in the handler")
            except KeyError:
                inner = failed_backward()
                found.append(inner is not None and inner[1] is seen[1])
    assert found == [True, True] and failed_backward() is None


def test_other_exceptions_are_no_failed_backward() -> None:
    circle = ValueError("its own cause")
    circle.__context__ = OSError()
    circle.__context__.__context__ = circle
    try:
        raise circle
    except ValueError:
        assert failed_backward() is None


def test_a_failed_backward_that_ended_the_script_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArithmeticError) as raised:
        backward()
    assert failed_backward() is None
    monkeypatch.setattr(sys, "last_value", raised.value, raising=False)
    assert failed_backward() == (raised.value, raised.value)
    assert id(raised.value) in excused_exceptions()
