"""Which ranks hear of a failure, and when."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest

from zero_core.failures import Failures


class Abort:
    """Records, in the order of calls, who was told of a failure: other parts of the model, or this part's ranks."""

    class place:
        size = 2

    is_alone = False

    def __init__(self) -> None:
        self.told: list[str] = []
        self.partition = self.model_part = self
        self.runtime = _Runtime(self.told)

    def abort(self, failure: BaseException) -> None:
        self.told.append(f"other parts: {failure}")


class _Runtime:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def abort(self, failure: BaseException) -> None:
        self._told.append(f"this part, then an update may be waited for: {failure}")


@pytest.mark.parametrize("context", ["abort_all_on_failure", "may_be_caught"])
def test_other_parts_of_the_model_hear_of_a_failure_before_this_rank_waits_for_an_update(context: str) -> None:
    state: Any = Abort()
    failures: Any = Failures(state, None)  # type: ignore[arg-type]
    opened: AbstractContextManager[None] = (
        failures.may_be_caught("forward") if context == "may_be_caught" else failures.abort_all_on_failure()
    )
    with pytest.raises(ValueError, match="a bad batch"), opened:
        raise ValueError("a bad batch")
    assert [line.partition(":")[0] for line in state.told] == [
        "other parts",
        "this part, then an update may be waited for",
    ]
