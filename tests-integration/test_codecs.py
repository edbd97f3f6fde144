"""Block codecs: the kernels' bits against plain torch's, and what quantised collectives lose at most."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_comm import Group, QuantizedGather, QuantizedReduce, Tag, open_group, run_ranks
from zero_core.kernels import NativeBlockQuantizer
from zero_precision import BlockCodec, BlockFormat

FORMATS: tuple[BlockFormat, ...] = ("int8", "int4", "fp8_e4m3", "fp8_e5m2")
SPECIAL = (0.0, -0.0, 1e-44, -1e-38, 2.0**-100, 2.0**-101, 1e30, -3.4e38, math.nan, math.inf, -math.inf)


@st.composite
def adversarial(draw: st.DrawFn) -> torch.Tensor:
    """Blocks of very different magnitudes, with outliers, zeros, denormal numbers, NaN and infinities put in."""
    numel = draw(st.integers(0, 700))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    powers = torch.randint(-140, 127, (numel // 32 + 1,), generator=generator).repeat_interleave(32)[:numel]
    x = torch.randn(numel, generator=generator) * torch.ldexp(torch.ones(numel), powers)
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=6)):
        if numel:
            x[draw(st.integers(0, numel - 1))] = value
    return x.to(draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=120, deadline=None)
@given(x=adversarial(), block=st.sampled_from([2, 32, 64, 256]))
def test_kernels_and_plain_torch_give_the_same_bits_within_the_bound(
    name: BlockFormat, x: torch.Tensor, block: int
) -> None:
    native, plain = BlockCodec(name, block=block, quantizer=NativeBlockQuantizer()), BlockCodec(name, block=block)
    payload, scales = native.encode(x)
    for got, wanted in zip((payload, scales), plain.encode(x), strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    decoded = torch.empty_like(x), torch.empty_like(x)
    native.decode(payload, scales, decoded[0])
    plain.decode(payload, scales, decoded[1])
    assert torch.equal(decoded[0].nan_to_num(7.0), decoded[1].nan_to_num(7.0))
    assert torch.equal(decoded[0].isnan(), decoded[1].isnan())

    exact = x.float().double()  # what is beyond float32 is infinite before it is encoded
    single = torch.empty(x.numel())
    native.decode(payload, scales, single)
    survives = ~exact.isfinite()
    assert torch.equal(single.double()[exact.isinf()], exact[exact.isinf()])
    assert bool(single[exact.isnan()].isnan().all())
    bounds = native.error_bound(scales).double().repeat_interleave(block)[: x.numel()]
    assert bool(((single.double() - exact).abs() <= bounds)[~survives & bounds.isfinite()].all())
    assert not bool(single[bounds.isinf()].isfinite().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_blocks_have_the_same_codes(name: BlockFormat, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    largest = torch.empty(60_000).uniform_(1e38, 3.3e38, generator=generator)
    x = torch.stack([largest * torch.rand(60_000, generator=generator), -largest], dim=1).flatten().to(dtype)
    native, plain = BlockCodec(name, block=2, quantizer=NativeBlockQuantizer()), BlockCodec(name, block=2)
    for got, wanted in zip(native.encode(x), plain.encode(x), strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_hundred_thousand_blocks_have_the_same_bits(name: BlockFormat, dtype: torch.dtype) -> None:
    """Values of few digits often lie next to the middle of two codes, where the last bit of a factor decides."""
    x = torch.randn(100_000 * 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    native, plain = BlockCodec(name, block=8, quantizer=NativeBlockQuantizer()), BlockCodec(name, block=8)
    assert all(torch.equal(a, b) for a, b in zip(native.encode(x), plain.encode(x), strict=True))


def gradients(rank: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator) * torch.logspace(-4, 1, numel)


def over_two_nodes(name: BlockFormat, ranks_per_node: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's averaged slice, and the weights that a gather gives it."""
    codec = BlockCodec(name, block=64, quantizer=NativeBlockQuantizer())
    grid = torch.arange(dist.get_world_size()).view(-1, ranks_per_node)
    inside, across = (Group(open_group(rows)) for rows in (grid.tolist(), grid.T.tolist()))
    reduction = QuantizedReduce(inside, across, codec)
    flat, out = gradients(dist.get_rank(), size * dist.get_world_size()), torch.empty(size)
    reduction.reduce_scatter(flat, out, Tag("reduce", "block")).wait()
    everyone = Group(open_group([grid.view(-1).tolist()]))
    weights = torch.empty(size * everyone.world_size)
    QuantizedGather(everyone, codec).all_gather(weights, flat[:size], Tag("gather", "block")).wait()
    return out, weights


def bounds_of(codec: BlockCodec, x: torch.Tensor) -> torch.Tensor:
    return codec.error_bound(codec.encode(x)[1]).repeat_interleave(codec.block)[: x.numel()]


def decoded(codec: BlockCodec, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    codec.decode(*codec.encode(x), out)
    return out


@functools.cache
def results(name: BlockFormat, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return run_ranks(over_two_nodes, 4, name, 2, size)


@pytest.mark.parametrize("size", [1, 101])
@pytest.mark.parametrize("name", ["int4", "fp8_e4m3"])
def test_a_quantised_average_is_within_the_bounds_of_its_messages(name: BlockFormat, size: int) -> None:
    codec = BlockCodec(name, block=64)
    for owner, (average, _) in enumerate(results(name, size)):
        terms = [gradients(rank, 4 * size).view(4, size)[owner] for rank in range(4)]
        neighbour, own_node = owner ^ 1, owner // 2
        far = 2 * (1 - own_node)  # the first rank of the other node
        helper = far + owner % 2  # the rank there that sums for this one
        allowed = bounds_of(codec, terms[neighbour]) + bounds_of(codec, terms[helper ^ 1])
        allowed += bounds_of(codec, terms[helper] + decoded(codec, terms[helper ^ 1]))
        error = (average * 4 - sum(terms)).abs()
        assert bool((error <= allowed * (1 + 1e-5)).all()), (error / allowed).max()
        assert size == 1 or bool((error > 0.05 * allowed).any())


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_gathered_weights_are_the_decoded_shards_on_every_rank(name: BlockFormat) -> None:
    codec = BlockCodec(name, block=64)
    expected = torch.cat([decoded(codec, gradients(rank, 4 * 101)[:101]) for rank in range(4)])
    assert all(torch.equal(weights, expected) for _, weights in results(name, 101))
