from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from zero_precision import PrecisionError, PrecisionPolicy, dtype_name, parse_dtype

PAPER = PrecisionPolicy.fp16(accumulate_dtype=torch.float16)

# arXiv 1910.02054v3, table 1: gigabytes per device for 1, 4, 16, 64, 256 and 1024 ranks.
TABLE_1 = {
    (7.5, 1): (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    (7.5, 2): (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    (7.5, 3): (120, 30, 7.5, 1.88, 0.47, 0.12),
    (128, 1): (2048, 896, 608, 536, 518, 513),
    (128, 2): (2048, 704, 368, 284, 263, 257),
    (128, 3): (2048, 512, 128, 32, 8, 2),
    (1000, 1): (16000, 7000, 4750, 4187, 4046, 4011),
    (1000, 2): (16000, 5500, 2875, 2218, 2054, 2013),
    (1000, 3): (16000, 4000, 1000, 250, 62.5, 15.6),
}
CELLS = [
    (billions, stage, 4**power, printed)
    for (billions, stage), row in TABLE_1.items()
    for power, printed in enumerate(row)
]


@pytest.mark.parametrize(("billions", "stage", "world_size", "printed"), CELLS)
def test_bytes_per_parameter_reproduces_every_cell_of_the_zero_paper(billions, stage, world_size, printed):
    decimals = len(str(printed).partition(".")[2])
    assert abs(billions * PAPER.bytes_per_parameter(stage, world_size) - printed) <= 10**-decimals


@pytest.mark.parametrize(
    ("policy", "state_tensors", "expected"),
    [
        (PAPER, 2, 16),
        (PrecisionPolicy.bf16(), 2, 18),
        (PrecisionPolicy.fp16(), 2, 18),
        (PrecisionPolicy.pure_bf16(), 2, 8),
        (PrecisionPolicy.full(), 2, 16),
        (PrecisionPolicy.full(torch.float64), 2, 32),
        (PrecisionPolicy.full(), 0, 8),
        (PrecisionPolicy.bf16(master_dtype=torch.bfloat16), 1, 10),
    ],
)
def test_a_single_rank_holds_every_byte_at_any_stage(policy, state_tensors, expected):
    assert {policy.bytes_per_parameter(stage, 1, state_tensors=state_tensors) for stage in range(4)} == {expected}


@pytest.mark.parametrize(("stage", "world_size"), [(4, 1), (-1, 1), (1, 0), (7, 2)])
def test_bytes_per_parameter_refuses_what_does_not_exist(stage, world_size):
    with pytest.raises(PrecisionError, match=f"stage={stage}, world_size={world_size}"):
        PAPER.bytes_per_parameter(stage, world_size)


def test_the_mixed_defaults_are_half_on_the_wire_and_float32_where_sums_are_kept():
    for policy, half in ((PrecisionPolicy.bf16(), torch.bfloat16), (PrecisionPolicy.fp16(), torch.float16)):
        assert (policy.param_dtype, policy.gradient_dtype, policy.wire_dtype) == (half, half, half)
        assert {policy.accumulate_dtype, policy.master_dtype, policy.state_dtype} == {torch.float32}
        assert policy.has_master and policy.buffer_dtype is None and policy.keep_fp32 == ()
        assert policy.needs_loss_scale == (half == torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_full_policy_uses_one_dtype_and_has_no_copy(dtype):
    policy = PrecisionPolicy.full(dtype)
    assert {policy.param_dtype, policy.accumulate_dtype, policy.wire_dtype, policy.state_dtype} == {dtype}
    assert not policy.has_master and policy.update_dtype == dtype


def test_a_master_of_the_parameter_dtype_is_no_separate_copy():
    policy = PrecisionPolicy.full(master_dtype=torch.float32)
    assert not policy.has_master and policy.update_dtype == torch.float32
    assert policy.bytes_per_parameter(0, 1) == PrecisionPolicy.full().bytes_per_parameter(0, 1)


def test_overrides_replace_single_fields_and_the_policy_is_frozen():
    policy = PrecisionPolicy.bf16(wire_dtype=torch.float32, keep_fp32=["norm", nn.LayerNorm])
    assert policy.wire_dtype == torch.float32 and policy.keep_fp32 == ("norm", nn.LayerNorm)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = torch.float32
    assert policy == PrecisionPolicy.bf16(wire_dtype=torch.float32, keep_fp32=("norm", nn.LayerNorm))
    assert hash(policy) == hash(dataclasses.replace(policy))


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: PrecisionPolicy.full(torch.bfloat16), "pure_bf16"),
        (lambda: PrecisionPolicy.bf16(param_dtype=torch.int8), "param_dtype.*int8"),
        (lambda: PrecisionPolicy.bf16(param_dtype="bf16"), "param_dtype.*'bf16'"),
        (lambda: PrecisionPolicy.bf16(wire_dtype=None), "wire_dtype"),
        (lambda: PrecisionPolicy.bf16(wire_dtype=torch.float16), "wire_dtype.*bf16"),
        (lambda: PrecisionPolicy.full(master_dtype=torch.bfloat16), "master_dtype.*param_dtype"),
        (lambda: PrecisionPolicy.full(accumulate_dtype=torch.bfloat16), "accumulate_dtype.*param_dtype"),
        (lambda: PrecisionPolicy.full(state_dtype=torch.bfloat16), "state_dtype.*param_dtype"),
        (lambda: PrecisionPolicy.pure_bf16(wire_dtype=torch.float32), "accumulate_dtype.*wire_dtype"),
        (lambda: PrecisionPolicy.bf16(keep_fp32="norm"), "list of patterns"),
        (lambda: PrecisionPolicy.bf16(keep_fp32=[3]), "module classes, got 3"),
    ],
)
def test_dtypes_that_cannot_go_together_are_refused_by_field_name(build, named):
    with pytest.raises(PrecisionError, match=named):
        build()


def test_the_table_has_one_row_per_thing_and_prints_all_of_them():
    policy = PrecisionPolicy.bf16(buffer_dtype=torch.float32, keep_fp32=["norm"])
    rows = {row.thing: (row.dtype, row.nbytes, row.sharded_from) for row in policy.table()}
    assert rows == {
        "parameter": ("bf16", 2, 3),
        "gradient from autograd": ("bf16", 2, None),
        "accumulated gradient": ("fp32", 4, 2),
        "on the wire": ("bf16", 2, None),
        "master": ("fp32", 4, 1),
        "state, each": ("fp32", 4, 1),
        "buffer": ("fp32", 4, None),
        "kept in fp32: norm": ("fp32", 4, 3),
    }
    text = str(policy)
    assert all(thing in text for thing in rows) and len(text.splitlines()) == len(rows) + 1
    assert "none" in str(PrecisionPolicy.full())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("BF16", torch.bfloat16),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("F16", torch.float16),
        ("fp32", torch.float32),
        ("float", torch.float32),
        ("fp64", torch.float64),
        ("double", torch.float64),
        (torch.float64, torch.float64),
    ],
)
def test_dtypes_are_known_by_their_usual_names(name, dtype):
    assert parse_dtype(name) == dtype
    assert parse_dtype(dtype_name(dtype)) == dtype


@pytest.mark.parametrize("name", ["fp8", "int8", "", torch.int8, torch.complex64])
def test_other_dtypes_are_refused(name):
    with pytest.raises(PrecisionError, match="expected a training dtype"):
        parse_dtype(name)
