from __future__ import annotations

import math

import pytest
import torch

from zero_precision import PrecisionError, SignCodec

SIZES = [0, 1, 7, 8, 9, 16, 17, 63, 64, 65, 1000]


def roundtrip(codec, x):
    payload, scales = codec.encode(x)
    out = torch.empty_like(x)
    codec.decode(payload, scales, out)
    return out


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_element_is_its_sign_times_the_mean_magnitude_of_its_block(numel, dtype):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    codec = SignCodec(16)
    payload, scales = codec.encode(x)
    assert payload.dtype == torch.uint8 and payload.numel() == codec.payload_nbytes(numel) == math.ceil(numel / 8)
    assert scales.dtype == torch.float32 and scales.numel() == codec.scales_numel(numel)
    expected = [torch.where(b < 0, -b.float().abs().mean(), b.float().abs().mean()) for b in x.split(16) if numel]
    torch.testing.assert_close(
        roundtrip(codec, x).float(), torch.cat(expected).to(dtype).float() if numel else x.float()
    )


def test_element_i_is_bit_i_of_the_payload_and_zero_is_positive():
    payload, _ = SignCodec(8).encode(torch.tensor([-1.0, 0.0, -0.0, 2.0, -3.0, 1.0, 1.0, -1.0, -1.0, 1.0]))
    assert payload.tolist() == [0b10010001, 0b00000001]


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_what_a_block_loses_is_what_is_documented_and_never_all(magnitude):
    x = torch.randn(512, generator=torch.Generator().manual_seed(1)).double() * magnitude
    x[5] *= 100  # an outlier costs most
    codec = SignCodec(64)
    lost = (roundtrip(codec, x) - x).square().view(-1, 64).sum(1)
    _, scales = codec.encode(x)
    whole = x.square().view(-1, 64).sum(1)
    torch.testing.assert_close(lost, whole - 64 * scales.double().square(), rtol=1e-5, atol=0.0)
    assert bool((lost < whole).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_of_a_block_that_is_not_finite_decodes_to_a_number(bad):
    x = torch.ones(48)
    x[20] = bad
    out = roundtrip(SignCodec(16), x)
    assert not bool(out[16:32].isfinite().any())
    assert torch.equal(out[:16], x[:16]) and torch.equal(out[32:], x[32:])


def test_zeros_stay_zeros():
    assert not bool(roundtrip(SignCodec(16), torch.zeros(40)).any())


@pytest.mark.parametrize("block", [0, 4, 12, True, 8.0])
def test_wrong_blocks_are_refused(block):
    with pytest.raises(PrecisionError, match="positive multiple of 8"):
        SignCodec(block)


def test_wrong_tensors_are_refused_with_the_sizes_that_fit():
    codec = SignCodec(16)
    with pytest.raises(PrecisionError, match="1-D floating tensor"):
        codec.encode(torch.ones(2, 2))
    payload, scales = codec.encode(torch.ones(40))
    with pytest.raises(PrecisionError, match="5 bytes and 3 scales, got 5 and 2"):
        codec.decode(payload, scales[:2], torch.empty(40))
