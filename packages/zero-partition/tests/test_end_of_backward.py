"""The callback that sees the end of the user's backward pass: its own exception, before the user's code gets it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from zero_partition.end_of_backward import EndOfBackward


def fail(*_: Any) -> None:
    raise ArithmeticError("no luck")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


class Run:
    """A backward pass of ``(input * 2).exp() * 3`` that queues the callback when it has come to the product."""

    def __init__(self, end: Callable[[], None] = lambda: None) -> None:
        self.seen: list[Any] = []
        self._end = end
        self.input = torch.ones(2, requires_grad=True)
        self.middle = (self.input * 2).exp()
        self.loss = (self.middle * 3).sum()
        self.middle.register_hook(self._queue)

    def _queue(self, _gradient: torch.Tensor) -> None:
        end = EndOfBackward(self._at_end, self.seen.append)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _at_end(self) -> None:
        self.seen.append("end")
        self._end()

    def caught(self) -> BaseException | None:
        """Run it; return what it raises."""
        try:
            self.loss.backward()
        except BaseException as error:
            self.seen.append("handler")
            return error
        return None


def test_a_run_that_succeeds_ends_once() -> None:
    run = Run()
    assert run.caught() is None and run.seen == ["end"]


def failing(kind: str) -> Run:
    run = Run(fail if kind == "end" else lambda: None)
    if kind in ("hook", "interrupt"):
        run.input.register_hook(fail if kind == "hook" else interrupt)
    elif kind == "post hook":
        run.input.register_post_accumulate_grad_hook(fail)
    elif kind == "native":
        run.middle.detach().mul_(2)  # exp has saved its result, and its backward refuses in C++
    return run


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("hook", ArithmeticError),
        ("post hook", ArithmeticError),
        ("interrupt", KeyboardInterrupt),
        ("native", RuntimeError),
        ("end", ArithmeticError),
    ],
)
def test_a_run_that_raises_tells_its_exception_before_the_user_s_handler(
    kind: str, raised: type[BaseException]
) -> None:
    run = failing(kind)
    error = run.caught()
    assert type(error) is raised
    *before, told, last = run.seen
    assert told is error and last == "handler" and before == (["end"] if kind == "end" else [])
    assert sys.gettrace() is None


def test_a_run_inside_another_s_backward_tells_the_outer_one_s_exception() -> None:
    run = Run()
    inner = torch.ones(2, requires_grad=True)
    inner.register_hook(fail)
    product = (inner * 2).sum()
    run.middle.register_hook(lambda _gradient: product.backward())
    error = run.caught()
    assert isinstance(error, ArithmeticError) and run.seen == [error, "handler"]


def test_a_debugger_keeps_its_trace_function() -> None:
    events: list[str] = []

    def debugger(_frame: FrameType, event: str, _details: Any) -> Any:
        events.append(event)
        return debugger

    run = failing("hook")
    sys.settrace(debugger)
    try:
        error = run.caught()
        kept = sys.gettrace()
    finally:
        sys.settrace(None)
    assert kept is debugger and run.seen == [error, "handler"]
    assert events.count("exception") >= 3  # the hook's frame, torch's two and the one above


def test_what_the_end_of_a_failed_run_raises_has_its_cause() -> None:
    def broken(failure: BaseException | None) -> None:
        raise ValueError("a second failure") from failure

    value = torch.ones(2, requires_grad=True)
    product = value * 2
    end = EndOfBackward(lambda: None, broken)
    queue = torch.autograd.Variable._execution_engine.queue_callback
    product.register_hook(lambda _gradient, ends=[end]: queue(ends.pop()))
    value.register_hook(fail)
    del end
    with pytest.raises(ValueError, match="a second failure") as raised:
        product.sum().backward()
    assert isinstance(raised.value.__cause__, ArithmeticError) and sys.gettrace() is None
