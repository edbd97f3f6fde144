"""The figures of DeepSpeed's estimators, to the byte."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest

from zero_plan import count_parameters, estimate_zero2, estimate_zero3

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def peers() -> Any:
    """DeepSpeed's estimators of stages 3 and 2, on a machine that need not have an accelerator."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    reason = "deepspeed is not installed: nothing to compare with"
    return (
        pytest.importorskip("deepspeed.runtime.zero.stage3", reason=reason),
        pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2", reason=reason),
    )


def _setups() -> list[tuple[int, int, int, int, float]]:
    draw = random.Random(7)
    fixed = [
        (2_783_959_040, 65_798_144, gpus, nodes, 1.5) for gpus, nodes in itertools.product((1, 4, 8), (1, 2, 3, 64))
    ]
    drawn = []
    for _ in range(200):
        total = int(10 ** draw.uniform(3, 13))
        largest = draw.randint(1, total)
        drawn.append((total, largest, draw.randint(1, 16), draw.randint(1, 600), draw.choice([1.0, 1.5, 1.37])))
    return fixed + drawn


def test_stage_3_to_the_byte(peers: Any) -> None:
    for total, largest, gpus, nodes, factor in _setups():
        for row in estimate_zero3(
            total, largest, gpus_per_node=gpus, nodes=nodes, additional_buffer_factor=factor
        ).rows:
            cpu, gpu, _ = peers[0].estimate_zero3_model_states_mem_needs(
                total,
                largest,
                gpus,
                nodes,
                cpu_offload=row.offload_optimizer == "cpu",
                cpu_offload_params=row.offload_param == "cpu",
                zero_init=row.zero_init,
                additional_buffer_factor=factor,
            )
            assert (row.cpu_bytes, row.gpu_bytes) == (cpu, gpu)


def test_stage_2_to_the_byte(peers: Any) -> None:
    for total, _, gpus, nodes, factor in _setups():
        for row in estimate_zero2(total, gpus_per_node=gpus, nodes=nodes, additional_buffer_factor=factor).rows:
            offload = row.offload_optimizer == "cpu"
            expected = peers[1].estimate_zero2_model_states_mem_needs(total, gpus, nodes, offload, factor)
            assert (row.cpu_bytes, row.gpu_bytes) == expected


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (8, 1), (4, 3)])
def test_the_printed_tables_differ_in_the_name_of_the_device_only(
    peers: Any, capsys: pytest.CaptureFixture[str], gpus: int, nodes: int
) -> None:
    sizes = (2_783_959_040, 65_798_144)
    peers[0].estimate_zero3_model_states_mem_needs_all_cold(*sizes, gpus, nodes)
    peers[1].estimate_zero2_model_states_mem_needs_all_cold(sizes[0], gpus, nodes)
    theirs = capsys.readouterr().out.replace("OffloadDeviceEnum.cpu", "cpu ")
    print(estimate_zero3(*sizes, gpus_per_node=gpus, nodes=nodes))
    print(estimate_zero2(sizes[0], gpus_per_node=gpus, nodes=nodes))
    assert capsys.readouterr().out == theirs


def test_a_live_model_is_counted_alike(peers: Any) -> None:
    from torch import nn

    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    model.register_module("tied", nn.Linear(32, 64))
    model.tied.weight = nn.Parameter(model.encoder.layers[0].linear1.weight.data)
    assert count_parameters(model) == peers[0].model_to_params(model)
    assert count_parameters(model).total == peers[1].model_to_params(model)
