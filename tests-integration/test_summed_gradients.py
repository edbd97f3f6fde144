"""`gradient_allreduce_op` "sum" is plain torch's mean times the number of ranks, those that share a sequence too."""

from __future__ import annotations

from typing import Any

import pytest
import training
from sequence_runs import Run, one_process, over_ranks

from zero_comm import run_ranks

SUM = {"gradient_allreduce_op": "sum"}
EXACT = {"offload_optimizer": {"device": "cpu", "overlap": "exact"}}
OVERLAPPED = Run(1, 2, offload=True, accumulation=2)


@pytest.mark.parametrize(
    ("runs", "ranks", "zero"),
    [
        ([Run(2, stage) for stage in (0, 1, 2, 3)], 2, {}),
        ([Run(2, 3, accumulation=2, offload=True), Run(2, 1, lora=True, offload=True)], 4, {}),
        ([OVERLAPPED, Run(1, 1, offload=True)], 2, EXACT),
        ([Run(1, 3, offload=True, accumulation=2)], 3, EXACT),
        ([Run(2, 2, offload=True), Run(2, 3, offload=True, recompute=True)], 4, EXACT),
        ([Run(1, 3, accumulation=2, offload=True), Run(1, 0)], 1, {}),
    ],
)
def test_summed_gradients_are_those_of_plain_torch(runs: list[Run], ranks: int, zero: dict[str, Any]) -> None:
    answers = run_ranks(over_ranks, ranks, runs, "", SUM, zero, timeout=280.0)
    for place, run in enumerate(runs):
        data = ranks // run.sequence
        weights, losses, norms = one_process(run, data, factor=ranks)
        for answer in (told[place] for told in answers):
            assert answer["norms"] == pytest.approx(norms, abs=1e-12, rel=1e-12), run
            assert training.deviation(answer["weights"], weights) <= 1e-12, run
            if answer["group"] == 0:
                assert answer["losses"] == pytest.approx(losses, abs=1e-12, rel=0)
