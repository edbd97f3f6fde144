"""Triton's block codecs and sums: the bits of the CPU kernels, of plain torch and of the reference.

`nox -s triton` runs them without a GPU, in Triton's interpreter (TRITON_INTERPRET=1); `nox -s gpu` compiled on one.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import get_args

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; `nox -s triton` brings it")

from zero_comm import sum_slices
from zero_core.kernels import NativeBlockQuantizer
from zero_optim_kernels import reference
from zero_precision import BlockCodec, BlockFormat, BlockQuantizer, TorchBlockQuantizer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FORMATS: tuple[BlockFormat, ...] = get_args(BlockFormat)
REFERENCE = {"int8": "int8", "int4": "int4", "fp8_e4m3": "e4m3"}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NUMELS = (1, 2, 301, 9001)
BLOCKS = (2, 64, 100, 256, 512, 5000)
SPECIAL = (0.0, -0.0, 1e-44, -1e-38, 2.0**-100, 2.0**-101, 1e30, -3.4e38)

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kernels() -> BlockQuantizer:
    from zero_precision._triton_blocks import TritonBlockQuantizer

    return TritonBlockQuantizer()


def blocks_of_all_magnitudes(numel: int, seed: int, *, poison: bool) -> torch.Tensor:
    """Neighbouring blocks from denormal to huge numbers; zeros, outliers and, asked for, NaN and infinities put in."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-140, 126, (numel // 32 + 1,), generator=generator).repeat_interleave(32)[:numel]
    x = torch.randn(numel, generator=generator) * torch.ldexp(torch.ones(numel), powers)
    for value in (*SPECIAL, *((math.nan, math.inf, -math.inf) if poison else ())):
        if numel > 100:
            x[int(torch.randint(numel, (1,), generator=generator))] = value
    x[200:264] = -0.0
    return x


def ties(limit: int) -> torch.Tensor:
    """A block whose scale is 1, with every number that lies in the middle of two codes or next to it."""
    halves = torch.arange(-limit, limit, dtype=torch.float32) + 0.5
    infinity = torch.tensor(math.inf)
    x = torch.cat((halves, halves.nextafter(infinity), halves.nextafter(-infinity), torch.tensor([float(limit)])))
    return torch.nn.functional.pad(x, (0, len(x) % 2))


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    got = got.cpu()
    nan = wanted.isnan()
    equal = torch.equal(got.isnan(), nan) and got.dtype == wanted.dtype
    return equal and torch.equal(got[~nan].view(torch.uint8), wanted[~nan].view(torch.uint8))


def compare(kernels: BlockQuantizer, device: str, x: torch.Tensor, name: BlockFormat, block: int) -> None:
    """Codes, scales and decoded numbers of ``x`` by all implementations."""
    codec = BlockCodec(name, block=block, quantizer=kernels)
    payload, scales = codec.encode(x.to(device))
    for other in (TorchBlockQuantizer(), NativeBlockQuantizer()):
        expected = other.quantize_blocks(x, name, block)
        assert torch.equal(payload.cpu(), expected[0]) and same_bits(scales, expected[1])
        for dtype in DTYPES:
            out, wanted = torch.empty(x.numel(), dtype=dtype, device=device), torch.empty(x.numel(), dtype=dtype)
            codec.decode(payload, scales, out)
            other.dequantize_blocks(*expected, wanted, name, block)
            assert same_bits(out, wanted), dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_adversarial_blocks_of_any_size_have_the_bits_of_the_other_implementations(
    kernels: BlockQuantizer, device: str, name: BlockFormat, dtype: torch.dtype
) -> None:
    for block in BLOCKS:
        for numel in NUMELS if block > 2 else NUMELS[:-1]:
            compare(kernels, device, blocks_of_all_magnitudes(numel, block, poison=True).to(dtype), name, block)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-44, 2.0**-101, math.nan, math.inf, -math.inf, 3.4e38, -1.0])
def test_a_block_of_one_value_beside_ordinary_ones(
    kernels: BlockQuantizer, device: str, name: BlockFormat, value: float
) -> None:
    x = torch.linspace(-3, 3, 200)
    x[64:128] = value
    compare(kernels, device, x, name, 64)


@pytest.mark.parametrize("name", FORMATS)
def test_middles_of_two_codes_go_to_the_even_one(kernels: BlockQuantizer, device: str, name: BlockFormat) -> None:
    x = ties({"int8": 127, "int4": 7, "fp8_e4m3": 448, "fp8_e5m2": 448}[name])
    if name == "fp8_e5m2":
        x = x * 128.0
    compare(kernels, device, x, name, len(x))
    for power in (2.0**-10, 2.0**-13, 2.0**-17):  # among the codes that are denormal numbers of the format
        scaled = x * power
        scaled[-2:] = x[-3:].abs().max()
        compare(kernels, device, scaled, name, len(x))


@pytest.mark.parametrize("name", FORMATS)
def test_every_payload_byte_decodes_alike(kernels: BlockQuantizer, device: str, name: BlockFormat) -> None:
    payload = torch.arange(256, dtype=torch.uint8)
    numel = 512 if name == "int4" else 256
    # the second and third scale make middles of two neighbours in bfloat16 and float16
    scales = torch.tensor([1.0, 257 / 256, 2049 / 2048, 3.0e-5, 1.0e-9, math.inf, 2.0**-107, 3.0e38])
    scales = scales.repeat(numel // 256)
    for dtype in DTYPES:
        out, wanted = torch.empty(numel, dtype=dtype, device=device), torch.empty(numel, dtype=dtype)
        kernels.dequantize_blocks(payload.to(device), scales.to(device), out, name, 32)
        TorchBlockQuantizer().dequantize_blocks(payload, scales, wanted, name, 32)
        assert same_bits(out, wanted), dtype


@pytest.mark.parametrize("name", REFERENCE)
def test_finite_blocks_have_the_bits_of_the_reference(kernels: BlockQuantizer, device: str, name: BlockFormat) -> None:
    x = blocks_of_all_magnitudes(2001, 7, poison=False)
    payload, scales = kernels.quantize_blocks(x.to(device), name, 96)
    expected = reference.quantize(x.numpy(), REFERENCE[name], 96)
    assert torch.equal(payload.cpu(), torch.from_numpy(expected[0]))
    assert same_bits(scales, torch.from_numpy(expected[1]))
    out = torch.empty_like(x, device=device)
    kernels.dequantize_blocks(payload, scales, out, name, 96)
    wanted = reference.dequantize(*expected, x.numel(), REFERENCE[name], 96)
    assert same_bits(out, torch.from_numpy(wanted))


def test_nothing_is_nothing(kernels: BlockQuantizer, device: str) -> None:
    payload, scales = kernels.quantize_blocks(torch.empty(0, device=device), "int4", 64)
    assert payload.numel() == scales.numel() == 0
    kernels.dequantize_blocks(payload, scales, torch.empty(0, device=device), "int4", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "numel"), [(2, 1), (3, 1000), (8, 4097)])
def test_sums_of_slices_have_the_bits_of_plain_torch(device: str, dtype: torch.dtype, count: int, numel: int) -> None:
    from zero_comm._triton_slices import sum_evenly_spaced

    rows = torch.randn(count, numel + 24, generator=torch.Generator().manual_seed(numel)).to(dtype)
    slices, there = [row[:numel] for row in rows], rows.to(device)
    for divisor in (1, count):
        for accumulate in (False, True):
            expected, out = torch.ones(numel), torch.ones(numel, device=device)
            sum_slices(slices, expected, divisor=divisor, accumulate=accumulate)
            sum_evenly_spaced(there[0], out, stride=numel + 24, count=count, divisor=divisor, accumulate=accumulate)
            assert torch.equal(out.cpu(), expected), (divisor, accumulate)


COMPILED = """
import re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zero_comm import _triton_slices as slices
from zero_precision import _triton_blocks as blocks

def arithmetic(kernel, arguments, **fixed):
    signature = {**arguments, **{name: "constexpr" for name in fixed}}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    text = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32)).asm["ptx"]
    inexact = r"\\b((?:add|div|fma|mad|max|min|mul|rcp|sub)(?:\\.[a-z]+)*\\.(?:bf16|f16|f32|f64))"
    return set(re.findall(inexact, text))

for name, (limit, largest, mantissa, bias, special) in blocks._FORMATS.items():
    code = dict(NIBBLES=name == "int4", MANTISSA=mantissa, BIAS=bias)
    x = dict(x="*bf16", payload="*u8", scales="*fp32", numel="i32")
    print(*arithmetic(blocks._encode, x, BLOCK=256, ROWS=16, COLUMNS=256, LIMIT=limit, LARGEST=largest, **code))
    out = dict(payload="*u8", scales="*fp32", out="*i16", numel="i32")
    print(*arithmetic(blocks._decode, out, BLOCK=256, TILE=4096, SPECIAL=special, BFLOAT16=True, **code))
summed = arithmetic(
    slices._sum,
    dict(first="*bf16", out="*fp32", numel="i32", stride="i32", divisor="fp32"),
    COUNT=8, DIVIDE=True, ACCUMULATE=True, TILE=2048,
)
assert summed == {"add.f32", "div.rn.f32"}, summed
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_kernels_divide_exactly_and_hold_nothing_that_could_be_fused(capability: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED, str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    used = {instruction for line in done.stdout.splitlines() for instruction in line.split()}
    assert used == {"div.rn.f32", "mul.f32"}
