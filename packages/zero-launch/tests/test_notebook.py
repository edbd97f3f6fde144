from __future__ import annotations

import os

import pytest

from zero_launch import LaunchError, notebook_launch


def test_a_closure_runs_on_every_rank_and_rank_0s_result_comes_back():
    offset = 40

    def job(step: int, *, scale: int) -> int:
        return offset + step * scale + int(os.environ["RANK"])

    assert notebook_launch(job, 1, args=(1,), kwargs={"scale": 2}) == 42
    assert notebook_launch(job, 2, args=(1,), kwargs={"scale": 2}, every_rank=True) == [42, 43]


def test_a_failing_rank_raises_here_with_its_traceback():
    def job() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("no such layer")

    with pytest.raises(LaunchError, match="rank 1 of 2 failed first: KeyError: 'no such layer'") as caught:
        notebook_launch(job, 2)
    (failure,) = caught.value.failures
    assert (failure.rank, failure.exit_code) == (1, 1)
    assert "in job" in failure.detail and "run_call" not in failure.detail
