"""What a step costs the host does not creep up: the Python functions that it calls for each layer."""

from __future__ import annotations

from host_cost_cases import calls_per_layer

from zero_comm import run_ranks

REPLICATED, RELEASED = 50, 190
"""Calls for a layer of two modules and three parameters, beyond torch's own: at stages 0 to 2, and at stage 3."""


def test_a_step_calls_few_python_functions_for_each_layer() -> None:
    found = run_ranks(calls_per_layer, 2)[0]
    assert max(found[:3]) <= REPLICATED and found[3] <= RELEASED, found
