"""`audit_every` in steps of `Engine.train_batch`: reductions are repeated, and what is not repeated is said."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import pytest
from train_batch_runs import Case, Net, batches, config, facts

import zero_core
from zero_comm import run_ranks


def flipped_in_arrival(engine: Any, unit: int) -> None:
    """Flip the lowest bit of the first averaged element of the unit whenever a reduction of it ends, as a broken
    network would: torch does not know."""
    gradients = engine.partition.runtime.gradients[unit]
    end = gradients.finish_reduce_scatter

    def broken() -> None:
        arrived = gradients._arriving if gradients._arriving is not None else gradients.reduced
        ctypes.c_uint8.from_address(arrived.data_ptr()).value ^= 1
        end()

    gradients.finish_reduce_scatter = broken


def audited(case: Case, folder: str, every: int | None, broken: int | None) -> tuple[dict[str, bytes], str, list[str]]:
    """The facts after three steps, what the first audit that fails says, and the warnings. ``broken``: the step in
    which all reductions are wrong."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_core").addHandler(handler)
    engine = zero_core.initialize(model=Net(), config=config(case, folder, audit_every=every))[0]
    failure = ""
    try:
        for step in range(3):
            if step == broken:
                for unit in engine.partition.runtime.gradients:
                    flipped_in_arrival(engine, unit)
            engine.train_batch(batches(step))
    except zero_core.AuditError as error:
        failure = str(error)
    found = facts(engine)
    engine.destroy(unshard=False)
    logging.getLogger("zero_core").removeHandler(handler)
    return found, failure, [text for text in said if "audit" in text]


@pytest.mark.parametrize("case", [Case("net"), Case("net", "bf16", "cpu")])
def test_audited_steps_have_the_bits_of_others_and_say_that_no_gradient_is_repeated(case: Case, tmp_path: Path) -> None:
    plain, every = (run_ranks(audited, 2, case, str(tmp_path), every, None) for every in (None, 1))
    for (found, failure, _), (expected, _, _) in zip(every, plain, strict=True):
        assert found == expected and failure == ""
    assert len(every[0][2]) == 1 and "train_batch" in every[0][2][0]


def test_a_wrong_reduction_is_found_on_every_rank(tmp_path: Path) -> None:
    for _, failure, _ in run_ranks(audited, 2, Case("net"), str(tmp_path), 1, 2):
        assert "the audit of step 2" in failure
        assert "is another when it is reduced again" in failure
