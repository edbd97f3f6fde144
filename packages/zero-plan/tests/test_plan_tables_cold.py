from __future__ import annotations

from typing import Any

import pytest

from zero_plan import PlanError, estimate_zero1, estimate_zero2, estimate_zero3, model_states_per_rank

T0_3B = (2_783_959_040, 65_798_144)

# GB (1e9 bytes) per device as printed in table 1 of arXiv 1910.02054v3: parameters, then stage, then ranks.
RANKS = (1, 4, 16, 64, 256, 1024)
PUBLISHED = {
    7_500_000_000: {
        1: "120 52.5 35.6 31.4 30.4 30.1",
        2: "120 41.3 21.6 16.6 15.4 15.1",
        3: "120 30 7.5 1.88 0.47 0.12",
    },
    128_000_000_000: {
        1: "2048 896 608 536 518 513",
        2: "2048 704 368 284 263 257",
        3: "2048 512 128 32 8 2",
    },
    1_000_000_000_000: {
        1: "16000 7000 4750 4187 4046 4011",
        2: "16000 5500 2875 2218 2054 2013",
        3: "16000 4000 1000 250 62.5 15.6",
    },
}
CELLS = [
    (params, stage, ranks, printed)
    for params, stages in PUBLISHED.items()
    for stage, line in stages.items()
    for ranks, printed in zip(RANKS, line.split(), strict=True)
]


def test_the_published_table_has_all_its_cells() -> None:
    assert len(CELLS) == 54


@pytest.mark.parametrize(("params", "stage", "ranks", "printed"), CELLS)
def test_model_states_are_those_published_to_one_printed_unit(
    params: int, stage: int, ranks: int, printed: str
) -> None:
    unit = 10 ** -len(printed.partition(".")[2])
    assert abs(model_states_per_rank(params, stage=stage, world_size=ranks) / 1e9 - float(printed)) <= unit


def test_model_states_without_sharding_are_the_same_at_any_number_of_ranks() -> None:
    assert {model_states_per_rank(1000, stage=0, world_size=n) for n in (1, 2, 7)} == {16_000}


def test_model_states_are_rounded_up_to_bytes_and_take_other_dtypes() -> None:
    assert model_states_per_rank(10, stage=1, world_size=7) == 40 + 18  # 120 / 7 = 17.1
    assert model_states_per_rank(10**18 + 1, stage=3, world_size=16) == 10**18 + 1
    full = model_states_per_rank(10, stage=2, world_size=2, parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8)
    assert full == 40 + 60


def test_stage_3_reproduces_the_documented_table() -> None:
    lines = str(estimate_zero3(*T0_3B)).splitlines()
    assert lines == [
        "Estimated memory needed for params, optim states and gradients for a:",
        "HW: Setup with 1 node, 1 GPU per node.",
        "SW: Model with 2783M total params, 65M largest layer params.",
        "  per CPU  |  per GPU |   Options",
        "   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1",
        "   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0",
        "   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1",
        "   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=0",
        "    0.37GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=1",
        "   15.56GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=0",
    ]


def test_stage_2_prints_the_optimizer_only() -> None:
    assert str(estimate_zero2(T0_3B[0], gpus_per_node=8, nodes=2)).splitlines() == [
        "Estimated memory needed for params, optim states and gradients for a:",
        "HW: Setup with 2 nodes, 8 GPUs per node.",
        "SW: Model with 2783M total params.",
        "  per CPU  |  per GPU |   Options",
        "  248.91GB |   5.19GB | offload_optimizer=cpu ",
        "  124.45GB |   8.10GB | offload_optimizer=none",
    ]


def test_stage_1_keeps_16_bit_gradients_whole() -> None:
    offloaded, on_device = estimate_zero1(10**9, gpus_per_node=4).rows
    assert (offloaded.gpu_bytes, offloaded.cpu_bytes) == (4 * 10**9, 24 * 10**9)
    assert (on_device.gpu_bytes, on_device.cpu_bytes) == (4 * 10**9 + 4 * 10**9, 24 * 10**9)


@pytest.mark.parametrize("devices", [1, 2, 8, 64])
def test_a_higher_stage_never_needs_more_on_a_device(devices: int) -> None:
    needs = [
        estimate_zero1(T0_3B[0], gpus_per_node=devices),
        estimate_zero2(T0_3B[0], gpus_per_node=devices),
        estimate_zero3(*T0_3B, gpus_per_node=devices),
    ]
    for offloaded in ("cpu", "none"):
        sizes = [min(row.gpu_bytes for row in need.rows if row.offload_optimizer == offloaded) for need in needs]
        assert sizes == sorted(sizes, reverse=True)


def test_init_lowers_the_host_need_where_it_is_bound_by_building_the_model() -> None:
    for with_init, without in zip(*[iter(estimate_zero3(*T0_3B, gpus_per_node=8).rows)] * 2, strict=True):
        assert with_init.zero_init and not without.zero_init
        assert with_init.gpu_bytes == without.gpu_bytes
        assert with_init.cpu_bytes < without.cpu_bytes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate_zero3(10, 11), "largest_layer_params: expected at most total_params (10), got 11"),
        (lambda: estimate_zero3(10, 0), "largest_layer_params: expected an integer >= 1, got 0"),
        (lambda: estimate_zero2(0), "total_params: expected an integer >= 1, got 0"),
        (lambda: estimate_zero2(7e9), "total_params: expected an integer >= 1, got 7000000000.0"),  # type: ignore[arg-type]
        (lambda: estimate_zero1(10, nodes=0), "nodes: expected an integer >= 1, got 0"),
        (lambda: estimate_zero1(10, gpus_per_node=-1), "gpus_per_node: expected an integer >= 1, got -1"),
        (lambda: estimate_zero2(10, additional_buffer_factor=0), "additional_buffer_factor: expected a number > 0"),
        (lambda: model_states_per_rank(10, stage=4, world_size=1), "stage: expected 0, 1, 2, 3, got 4"),
        (lambda: model_states_per_rank(10, stage=1, world_size=0), "world_size: expected an integer >= 1, got 0"),
    ],
)
def test_what_cannot_be_estimated_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        call()
    assert message in str(caught.value)
