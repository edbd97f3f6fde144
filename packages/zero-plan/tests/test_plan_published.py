"""Tables of the papers, to the digits that they print. Table 1 of ZeRO is in test_plan_tables_cold.py."""

from __future__ import annotations

import math

import pytest

from zero_plan import (
    Setup,
    StateBytes,
    Transformer,
    activation_bytes,
    by_tier,
    collectives,
    infinity,
    largest_model,
    link_bytes,
    load_machine,
    loss_bytes,
    model_states,
    step_flops,
    tier_bytes,
    working_bytes,
)
from zero_plan.activations import block_activation_bytes
from zero_plan.shapes import SHAPES

# ZeRO (arXiv 1910.02054v3), table 2: the largest model on 32 GB devices, 64-way data parallel, by degree of model
# parallelism; theoretical columns in billions: no ZeRO, Pos, Pos+g, Pos+g+p. The paper truncates the first row and
# multiplies it; 0.5T and 1T and 2T are printed for 512, 1024 and 2048.
TABLE_2 = {
    1: ("2", "7.6", "14.4", "128"),
    2: ("4", "15.2", "28.8", "256"),
    4: ("8", "30.4", "57.6", "512"),
    8: ("16", "60.8", "115.2", "1024"),
    16: ("32", "121.6", "230.4", "2048"),
}


@pytest.mark.parametrize("degree", TABLE_2)
def test_the_largest_models_are_those_published(degree: int) -> None:
    for stage, printed in enumerate(TABLE_2[degree]):
        first = TABLE_2[1][stage]
        digits = len(first.partition(".")[2])
        billions = largest_model(32e9, stage=stage, world_size=64) / 1e9
        truncated = math.floor(billions * 10**digits + 1e-9) / 10**digits
        assert f"{degree * truncated:.1f}".removesuffix(".0") == printed


# ZeRO-Infinity (arXiv 2104.07857), figure 2a: layers, hidden, heads -> parameters in T, TiB of states, TiB per node of
# activations and of checkpoints, GiB of model state and activation working memory. Sequence 1024; per node 32 sequences
# for checkpoints (paper) and 64 for activations, 4 per GPU for working memory (the batches that give the figures).
FIGURE_2A = [
    ((80, 10, 128), ("0.10", "1.83", "2.03", "0.05", "1.56", "1.63")),  # printed 1.95, not 1.56: see below
    ((100, 20, 160), ("0.50", "9.16", "3.91", "0.12", "6.25", "2.50")),
    ((128, 25, 256), ("1.01", "18.31", "7.13", "0.20", "9.77", "3.56")),
    ((195, 64, 512), ("10.05", "182.81", "24.38", "0.76", "64.00", "8.00")),
    ((315, 160, 1024), ("101.47", "1845.70", "88.59", "3.08", "400.00", "18.00")),
]


@pytest.mark.parametrize(("shape", "printed"), FIGURE_2A)
def test_figure_2a_of_zero_infinity_comes_out(shape: tuple[int, int, int], printed: tuple[str, ...]) -> None:
    layers, hidden, heads = shape[0], shape[1] * 1024, shape[2]
    figures = (
        infinity.params(layers, hidden) / 1e12,
        infinity.model_state_bytes(layers, hidden) / 2**40,
        layers * infinity.activation_working_bytes(hidden, heads, batch=64, sequence=1024) / 2**40,
        infinity.checkpoint_bytes(layers, hidden, batch=32, sequence=1024) / 2**40,
        infinity.state_working_bytes(hidden) / 2**30,
        infinity.activation_working_bytes(hidden, heads, batch=4, sequence=1024) / 2**30,
    )
    # To half a printed unit; the paper rounds 1.625 up.
    for figure, text in zip(figures, printed, strict=True):
        assert abs(figure - float(text)) <= 0.005 + 1e-9, (figure, text)


def test_the_printed_working_memory_of_the_first_row_is_not_that_of_its_formula() -> None:
    assert infinity.state_working_bytes(10 * 1024) / 2**30 == pytest.approx(1.5625)  # the paper prints 1.95


def test_thirty_two_trillion_parameters_fit_on_512_accelerators_with_nvme_and_not_without() -> None:
    machine = load_machine("dgx-2")
    params = 32 * 10**12
    # 20 bytes per parameter, as in the paper (section 3): gradients are kept in float32 as well.
    kept = StateBytes(gradient=6)
    setup = Setup(3, 512, 16, bytes=kept, offload_optimizer="nvme", offload_parameters="nvme")
    tiers = by_tier(model_states(params, setup))
    on_drives = 16 * (tiers["nvme"] + tiers["host"])  # the paper keeps gradients on the drives, too
    assert on_drives == 20 * 10**12
    assert on_drives <= machine.need("disk.capacity")
    assert 2 * on_drives > machine.need("disk.capacity")
    assert on_drives > machine.need("node.host_memory") + 16 * machine.need("device.memory")


def test_the_efficiencies_of_section_4_come_out() -> None:
    parameters = infinity.intensity_of_parameters(batch=1, sequence=1024)
    assert 0.5 < infinity.efficiency(parameters, 70e9, 70e12) < 0.51
    states = infinity.intensity_of_optimizer_states(batch=2, sequence=1024)
    assert 0.9 < infinity.efficiency(states, 1.5e12, 70e12) < 0.92
    assert infinity.efficiency(infinity.intensity_of_checkpoints(2048), 2e9, 70e12) > 0.5
    assert infinity.efficiency(infinity.intensity_of_checkpoints(8192), 1e9, 70e12) > 0.5
    assert infinity.bandwidth_for(0.5, parameters, 70e12) / 1e9 == pytest.approx(68, abs=0.5)
    assert infinity.bandwidth_for(0.9, states * 0.5, 70e12) / 1e9 == pytest.approx(2461, abs=0.5)


def test_zeropp_sends_three_quarters_of_the_model_across_instead_of_three_times() -> None:
    params, block = 2**30, 2**30
    model = 2 * params

    def across(**keys: bool) -> float:
        setup = Setup(3, 2**20, 16, codec_block=block, **keys)  # many nodes: (nodes - 1) / nodes is 1
        return link_bytes(collectives(params, setup), setup).across_per_node / model

    assert across() == pytest.approx(3, rel=1e-4)
    assert across(qwz=True) == pytest.approx(2, rel=1e-4)
    assert across(hpz=True) == pytest.approx(2, rel=1e-4)
    assert across(qgz=True) == pytest.approx(2.25, rel=1e-4)
    assert across(hpz=True, qwz=True, qgz=True) == pytest.approx(0.75, rel=1e-4)


def test_the_secondary_shard_of_zeropp_holds_the_model_once_per_node() -> None:
    # ZeRO++ (arXiv 2306.10209), memory analysis: 100 B, 1,024 GPUs, groups of 16: 8.9 times ZeRO-3.
    base = sum(row.nbytes for row in model_states(100 * 10**9, Setup(3, 1024, 16)))
    found = sum(row.nbytes for row in model_states(100 * 10**9, Setup(3, 1024, 16, hpz=True)))
    assert found / base == pytest.approx(9.0, abs=0.11)


@pytest.mark.parametrize(
    ("stage", "accumulation", "volume"),
    [(0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 1, 3), (0, 4, 2), (1, 4, 2), (2, 4, 5), (3, 4, 12)],
)
def test_the_volumes_of_section_7_of_zero(stage: int, accumulation: int, volume: int) -> None:
    setup = Setup(stage, 64, 8, accumulation)
    assert sum(row.volume for row in collectives(64 * 10**6, setup)) == volume * 2 * 64 * 10**6


def test_zero_offload_moves_four_bytes_per_parameter_over_the_bus() -> None:
    # ZeRO-Offload (arXiv 2101.06840), section 4.1: 2M of gradients down and 2M of parameters up, the minimum.
    moved = tier_bytes(10**9, Setup(2, 1, offload_optimizer="host"))
    assert moved == (2 * 10**9, 2 * 10**9, 0, 0)


def test_parameters_of_known_models() -> None:
    assert SHAPES["gpt2-xl"].params == 1_557_611_200
    assert SHAPES["llama-3-8b"].params == 8_030_261_248
    assert SHAPES["llama-3-70b"].params == 70_553_706_496


def test_operations_are_those_of_the_megatron_formula() -> None:
    # arXiv 2104.04473, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h), with recomputation.
    b, s, layers, h, vocabulary = 3, 2048, 96, 12288, 51200
    shape = Transformer(layers, h, 96, vocabulary, s, fused_attention=False)
    exact = 96 * b * s * layers * h * h + 16 * b * s * s * layers * h + 6 * b * s * h * vocabulary
    assert step_flops(shape, b, checkpointing="full") == exact


def test_activations_are_those_of_korthikanti() -> None:
    # arXiv 2205.05198: equation 1, s b h (34 + 5 a s / h); with selective recomputation 34 s b h; with full 2 s b h.
    b, s, a, h = 4, 2048, 96, 12288
    shape = Transformer(2, h, a, 51200, s, bias=True, dropout=True, fused_attention=False)
    assert block_activation_bytes(shape, b) == 34 * s * b * h + 5 * a * s * s * b
    assert block_activation_bytes(shape, b, checkpointing="attention") == 34 * s * b * h
    assert block_activation_bytes(shape, b, checkpointing="full") == 2 * s * b * h


# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: Llama 3.1 8B, FSDP2, 2 sequences of 8,192 per
# GPU, selective checkpointing of operators; GiB per GPU, eager and compiled.
@pytest.mark.parametrize(("ranks", "eager", "compiled"), [(8, 82.4, 77.0), (128, 67.0, 62.0)])
def test_llama_3_8b_under_fsdp2_on_h100_within_ten_percent(ranks: int, eager: float, compiled: float) -> None:
    shape = SHAPES["llama-3-8b"]
    # float32 parameters, gradients and moments are sharded; gathered units and activations are bf16.
    setup = Setup(3, ranks, 8, bytes=StateBytes(4, 4, 0, 8))
    total = by_tier(model_states(shape.units, setup))["device"]
    total += activation_bytes(shape, 2, checkpointing="operators") + loss_bytes(shape, 2)
    total += working_bytes(shape.units, Setup(3, ranks, 8), ahead=0)
    assert total / 2**30 == pytest.approx(eager, rel=0.1)
    assert total / 2**30 == pytest.approx(compiled, rel=0.1)
