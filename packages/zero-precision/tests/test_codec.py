from __future__ import annotations

import importlib.util
import math
import subprocess
import sys

import pytest
import torch

from zero_precision import BlockCodec, PrecisionError, TorchBlockQuantizer

FORMATS = ("int8", "int4", "fp8_e4m3", "fp8_e5m2")


def roundtrip(codec, x, dtype=torch.float32):
    payload, scales = codec.encode(x)
    out = torch.empty(x.numel(), dtype=dtype)
    codec.decode(payload, scales, out)
    return out


def bound(name, x, block):
    """The documented error bound, with a relative 1e-6 for the float32 products."""
    blocks = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block).abs().amax(1)
    largest = blocks.repeat_interleave(block)[: x.numel()]
    if name == "int8":
        limit = largest / 254
    elif name == "int4":
        limit = largest / 14
    elif name == "fp8_e4m3":
        limit = torch.maximum(x.abs() * 2**-4, largest / 448 * 2**-10)
    else:
        limit = torch.maximum(x.abs() * 2**-3, largest / 57344 * 2**-17)
    return limit + largest * 1e-6


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("numel", [0, 1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e30])
def test_every_element_is_within_the_documented_bound(name, numel, magnitude):
    torch.manual_seed(numel)
    x = torch.randn(numel) * torch.logspace(-3, 3, numel) * magnitude
    codec = BlockCodec(name, block=64)
    payload, scales = codec.encode(x)
    assert payload.dtype == torch.uint8 and payload.numel() == codec.payload_nbytes(numel)
    assert scales.dtype == torch.float32 and scales.numel() == codec.scales_numel(numel)
    assert bool(((roundtrip(codec, x) - x).abs() <= bound(name, x, 64)).all())


@pytest.mark.parametrize(("name", "nbytes"), [("int8", 1001), ("int4", 501), ("fp8_e4m3", 1001)])
def test_payload_sizes_are_those_of_the_format(name, nbytes):
    assert BlockCodec(name, block=100).payload_nbytes(1001) == nbytes
    assert BlockCodec(name, block=100).scales_numel(1001) == 11


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_floating_dtype_goes_in_and_out(name, dtype):
    x = torch.linspace(-3, 3, 200).to(dtype)
    out = roundtrip(BlockCodec(name, block=32), x, dtype)
    assert out.dtype == dtype
    assert bool(((out - x).float().abs() <= bound(name, x.float(), 32) + x.float().abs() * 2**-8).all())


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_element_of_a_block_survives_within_float32_rounding(name):
    x = torch.tensor([0.0, 0.1, -7.3, 2.0] * 16)
    assert math.isclose(roundtrip(BlockCodec(name, block=4), x).min().item(), -7.3, rel_tol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_all_zero_blocks_decode_to_zero(name):
    x = torch.cat((torch.zeros(64), torch.ones(64), torch.zeros(10)))
    _, scales = BlockCodec(name, block=64).encode(x)
    assert scales[0] == 0 and scales[2] == 0
    out = roundtrip(BlockCodec(name, block=64), x)
    assert torch.equal(out[:64], x[:64]) and torch.equal(out[128:], x[128:])


@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_infinities_survive_and_no_neighbour_in_their_block_is_finite(name):
    x = torch.linspace(-1, 1, 192)
    clean = roundtrip(BlockCodec(name, block=64), x)
    x[70], x[71], x[72] = math.nan, math.inf, -math.inf
    for there in (slice(70, 73), slice(71, 73), slice(72, 73), slice(70, 71)):
        y = x.clone()
        y[70:73] = 0.5
        y[there] = x[there]
        out = roundtrip(BlockCodec(name, block=64), y)
        assert torch.equal(out[y.isinf()], y[y.isinf()])
        assert bool(out[64:128][~y[64:128].isinf()].isnan().all())
        assert torch.equal(out[:64], clean[:64]) and torch.equal(out[128:], clean[128:])


@pytest.mark.parametrize("name", FORMATS)
def test_the_bound_of_each_block_holds_and_is_infinite_where_nothing_is_finite(name):
    torch.manual_seed(3)
    codec = BlockCodec(name, block=64)
    x = torch.randn(64 * 6) * torch.logspace(-30, 30, 6).repeat_interleave(64)
    x[64] *= 1e5  # one huge outlier
    x[128:192] = 1e-40  # denormal numbers
    x[192:256] = 0.0
    x[256] = math.nan
    payload, scales = codec.encode(x)
    out = torch.empty_like(x)
    codec.decode(payload, scales, out)
    bounds = codec.error_bound(scales)
    assert bounds.shape == scales.shape and bounds[4] == math.inf
    worst = (out.double() - x.double()).view(-1, 64).abs().amax(1)
    finite = torch.arange(6) != 4
    assert bool((worst <= bounds)[finite].all())
    assert bool((worst >= 0.3 * bounds)[[0, 5]].all()), "a bound that is never approached bounds nothing"


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_below_2_to_the_minus_100_are_zero_and_those_above_are_not(name):
    x = torch.cat((torch.full((64,), 1e-44), torch.full((64,), 2.0**-101), torch.full((64,), 2.0**-100)))
    out = roundtrip(BlockCodec(name, block=64), x)
    assert torch.equal(out[:128], torch.zeros(128))
    assert torch.allclose(out[128:], x[128:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_are_anchored_at_element_zero_so_shards_cut_at_blocks_encode_to_the_bytes_of_the_whole(name):
    torch.manual_seed(1)
    x, codec = torch.randn(320), BlockCodec(name, block=64)
    payload, scales = codec.encode(x)
    parts = [codec.encode(part) for part in (x[:128], x[128:192], x[192:])]
    assert torch.equal(torch.cat([part[0] for part in parts]), payload)
    assert torch.equal(torch.cat([part[1] for part in parts]), scales)


@pytest.mark.parametrize("name", FORMATS)
def test_encoding_what_was_decoded_gives_the_same_bytes(name):
    torch.manual_seed(2)
    codec = BlockCodec(name, block=64)
    once = roundtrip(codec, torch.randn(500))
    payload, _ = codec.encode(once)
    again, _ = codec.encode(roundtrip(codec, once))
    assert torch.equal(payload, again)


def test_nibbles_are_packed_low_half_first_in_twos_complement():
    payload, scales = TorchBlockQuantizer().quantize_blocks(torch.tensor([1.0, -1.0, 7.0]), "int4", 4)
    assert payload.tolist() == [0xF1, 0x07] and scales.tolist() == [1.0]
    payload, scales = TorchBlockQuantizer().quantize_blocks(torch.tensor([1.0, math.inf, -math.inf]), "int4", 4)
    assert payload.tolist() == [0x10, 0x0F] and scales.tolist() == [math.inf]


def test_encoding_leaves_its_input_alone_and_takes_strided_and_differentiable_ones():
    base = torch.randn(100, requires_grad=True)
    copy = base.detach().clone()
    payload, _ = BlockCodec(block=16).encode(base[::2])
    assert not payload.requires_grad and torch.equal(base.detach(), copy)
    assert torch.equal(payload, BlockCodec(block=16).encode(copy[::2].clone())[0])


def test_an_injected_quantizer_serves_every_format():
    class Counting(TorchBlockQuantizer):
        formats = ()

        def quantize_blocks(self, x, format, block):
            Counting.formats += (format,)
            return super().quantize_blocks(x, format, block)

    x = torch.randn(64)
    for name in FORMATS:
        BlockCodec(name, quantizer=Counting()).encode(x)
    assert Counting.formats == FORMATS


@pytest.mark.parametrize("arguments", [{"format": "int3"}, {"block": 0}, {"block": 7}, {"block": True}])
def test_wrong_formats_and_blocks_are_refused(arguments):
    with pytest.raises(PrecisionError, match="BlockCodec"):
        BlockCodec(**arguments)


def test_wrong_tensors_are_refused_with_the_sizes_that_fit():
    codec = BlockCodec("int4", block=64)
    payload, scales = codec.encode(torch.ones(130))
    with pytest.raises(PrecisionError, match="1-D floating tensor"):
        codec.encode(torch.ones(2, 2))
    with pytest.raises(PrecisionError, match="1-D floating tensor"):
        codec.encode(torch.arange(4))
    with pytest.raises(PrecisionError, match="65 uint8 and 3 float32"):
        codec.decode(payload[:-1], scales, torch.empty(130))
    with pytest.raises(PrecisionError, match="`out`"):
        codec.decode(payload, scales, torch.empty(13, 10))


SERVED = """
import sys
if sys.argv[1] == "absent":
    sys.modules["triton"] = None
import torch
from zero_precision import DeviceBlockQuantizer
assert "triton" not in sys.modules or sys.argv[1] == "absent"
quantizer = DeviceBlockQuantizer()
print(quantizer.describe(torch.device("cpu")), quantizer.describe(torch.device("cuda")), sep="\\n")
"""


def test_what_serves_a_device_is_said_and_triton_is_imported_for_cuda_alone():
    def said(triton):
        run = [sys.executable, "-c", SERVED, triton]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()

    reason = "import of triton halted; None in sys.modules"
    assert said("absent") == ["plain torch", f"plain torch, because triton cannot be imported ({reason})"]
    if importlib.util.find_spec("triton") is not None:
        assert said("there")[1].startswith("triton ")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_an_accelerator_gives_the_bits_of_the_cpu(name):
    device = torch.accelerator.current_accelerator()
    x = torch.randn(20_000 * 8, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    x[:5] = torch.tensor([math.nan, math.inf, -math.inf, 1e-44, -0.0])
    codec = BlockCodec(name, block=8)
    here, there = codec.encode(x), codec.encode(x.to(device))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
    out, far = torch.empty_like(x), torch.empty_like(x, device=device)
    codec.decode(*here, out)
    codec.decode(*there, far)
    assert torch.equal(out.isnan(), far.cpu().isnan()) and torch.equal(out.nan_to_num(1.0), far.cpu().nan_to_num(1.0))
