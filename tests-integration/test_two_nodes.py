"""What ZeRO++ puts on the wire between two nodes, by the kernel's counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from two_nodes import TwoNodes, why_not

HERE = Path(__file__).parent
pytestmark = pytest.mark.soak
SCALES = 1.016  # of a codec's payload


@pytest.fixture(scope="module")
def job() -> Any:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with TwoNodes() as nodes:
        return nodes.run(HERE / "_sharing_training.py", "transformer", "3", "plain,qwZ,hpZ,qgZ,ZeRO++")


@pytest.mark.parametrize("way", ["plain", "qwZ", "hpZ", "qgZ", "ZeRO++"])
def test_bytes_between_nodes_are_those_of_the_formula_and_the_kernel_agrees(job: Any, way: str) -> None:
    found, model = job["ways"][way], 2 * job["elements"]
    quantized = way in ("qwZ", "ZeRO++")
    forward = (0.5 if quantized else 1.0) * model
    backward = 0 if way in ("hpZ", "ZeRO++") else forward
    reduce = (0.125 if way in ("qgZ", "ZeRO++") else 1.0) * model  # 0.25 M x (G - 1) / G for G = 2 nodes
    for part, expected, coded in (
        ("forward", forward, quantized),
        ("backward", backward, quantized),
        ("reduce", reduce, way in ("qgZ", "ZeRO++")),
    ):
        padding = 1.01
        assert expected <= found[part] <= expected * padding * (SCALES if coded else 1), part
    headers = found["kernel"] / found["all"] - 1
    assert 0 <= headers <= 0.05, found
