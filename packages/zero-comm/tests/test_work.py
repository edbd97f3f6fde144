"""A collective whose computation is cut short has no result, and says so to everybody who waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zero_comm import Tag
from zero_comm.work import Work


def raising(failure: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise failure

    return run


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ValueError("no packet")])
@pytest.mark.parametrize("part", ["finish", "advance"])
def test_every_later_wait_raises_what_has_ended_the_computation(part: str, failure: BaseException) -> None:
    work = Work(Tag("reduce", "block.0"), **{part: raising(failure)})  # type: ignore[arg-type]
    with pytest.raises(type(failure)):
        work.advance() if part == "advance" else work.wait()
    for _ in range(2):
        with pytest.raises(type(failure)) as raised:
            work.wait()
        assert raised.value is failure
