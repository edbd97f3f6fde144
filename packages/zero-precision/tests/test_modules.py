from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

from zero_precision import (
    PrecisionError,
    PrecisionPolicy,
    autocast_dtypes,
    cast_floating,
    declared_keep_fp32,
    keep_fp32,
    kept_in_fp32,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layernorm = nn.LayerNorm(4)
        self.attention = nn.Linear(4, 4)
        self.register_buffer("norm_bias", torch.zeros(4))
        self.register_buffer("counter", torch.zeros(1, dtype=torch.int64))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["norm"], {f"layers.{i}.norm.{p}" for i in (0, 1) for p in ("weight", "bias")}),
        (
            ["*norm"],
            {f"layers.{i}.{m}.{p}" for i in (0, 1) for m in ("norm", "layernorm") for p in ("weight", "bias")},
        ),
        (["layers.0.norm"], {"layers.0.norm.weight", "layers.0.norm.bias"}),
        (["layers.*.attention.bias"], {"layers.0.attention.bias", "layers.1.attention.bias"}),
        (["norm_bias"], {"layers.0.norm_bias", "layers.1.norm_bias"}),
        (["head"], {"head.weight", "embed.weight"}),
        ([nn.Embedding], {"head.weight", "embed.weight"}),
        ([Block, "embed"], None),
        ([], set()),
    ],
)
def test_patterns_select_whole_name_parts_and_classes_select_their_insides(patterns, expected):
    names = {name for name, _ in Model().named_parameters(remove_duplicate=False)}
    names |= {"layers.0.norm_bias", "layers.1.norm_bias"}
    assert keep_fp32(Model(), patterns) == (names if expected is None else expected)


def test_the_model_itself_may_be_an_instance_of_the_class():
    assert keep_fp32(nn.LayerNorm(3), [nn.LayerNorm]) == {"weight", "bias"}


@pytest.mark.parametrize(("pattern", "named"), [("atention", "'attention'"), (nn.Conv1d, "Conv1d"), ("ead", "'head'")])
def test_a_pattern_that_selects_nothing_is_an_error_with_the_nearest_name(pattern, named):
    with pytest.raises(PrecisionError, match=named):
        keep_fp32(Model(), [pattern])
    assert keep_fp32(Model(), [pattern], strict=False) == frozenset()


def test_lists_that_a_model_declares_hold_for_the_dtypes_they_are_meant_for():
    model = Model()
    model._keep_in_fp32_modules_strict = ["embed"]
    model.layers[1]._keep_in_fp32_modules = ["norm"]
    half = keep_fp32(model, declared_keep_fp32(model, torch.float16), strict=False)
    assert half == {"embed.weight", "head.weight", "layers.1.norm.weight", "layers.1.norm.bias"}
    assert keep_fp32(model, declared_keep_fp32(model, torch.float16)) == half
    assert declared_keep_fp32(model, torch.bfloat16) == ("embed",)
    assert declared_keep_fp32(model, torch.float32) == declared_keep_fp32(model, torch.float64) == ()


def test_a_declared_entry_that_selects_nothing_is_left_out():
    model = Model()
    model._keep_in_fp32_modules_strict = ["wo", "embed"]
    assert declared_keep_fp32(model, torch.bfloat16) == ("embed",)


def test_a_policy_keeps_its_own_patterns_and_those_that_the_model_declares():
    model = Model()
    model._keep_in_fp32_modules_strict = ["embed"]
    norm = {f"layers.{i}.norm.{p}" for i in (0, 1) for p in ("weight", "bias")}
    embed = {"embed.weight", "head.weight"}
    assert kept_in_fp32(model, PrecisionPolicy.bf16(keep_fp32=["norm"])) == norm | embed
    assert kept_in_fp32(model, PrecisionPolicy.bf16(keep_fp32=["norm"], keep_declared_fp32=False)) == norm
    assert kept_in_fp32(model, PrecisionPolicy.bf16(keep_declared_fp32=False)) == frozenset()
    assert kept_in_fp32(model, PrecisionPolicy.full(keep_fp32=["norm"])) == frozenset()
    with pytest.raises(PrecisionError, match="'nrm'.*'norm'"):
        kept_in_fp32(model, PrecisionPolicy.bf16(keep_fp32=["nrm"]))


def test_under_autocast_only_weights_of_matrix_products_are_gathered_narrow():
    dtypes = autocast_dtypes(Model(), torch.bfloat16)
    narrow = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert narrow == {f"layers.{i}.attention.{p}" for i in (0, 1) for p in ("weight", "bias")}
    assert dtypes["embed.weight"] == dtypes["head.weight"] == torch.float32


def test_autocast_never_touches_float64_or_subclasses_that_may_use_their_weight_otherwise():
    class Custom(nn.Linear):
        pass

    assert autocast_dtypes(nn.Linear(2, 2).double(), torch.bfloat16)["weight"] == torch.float64
    assert autocast_dtypes(Custom(2, 2), torch.float16)["weight"] == torch.float32
    assert autocast_dtypes(Custom(2, 2), torch.float16, eligible=[Custom])["weight"] == torch.float16
    with pytest.raises(PrecisionError, match="float32"):
        autocast_dtypes(nn.Linear(2, 2), torch.float32)


def test_gathering_in_the_autocast_dtype_changes_no_value_of_forward_or_gradient():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), torch.randn(5, 8)
    narrow = {
        name: p.detach().to(autocast_dtypes(model, torch.bfloat16)[name]).requires_grad_()
        for name, p in model.named_parameters()
    }
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        got = torch.func.functional_call(model, narrow, x)
    assert torch.equal(got, expected)
    expected.float().square().mean().backward()
    got.float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(narrow[name].grad.float(), parameter.grad)


def test_casting_reaches_into_containers_and_leaves_everything_else():
    Pair = collections.namedtuple("Pair", "left right")
    ids, mask, z = torch.arange(3), torch.ones(3, dtype=torch.bool), torch.zeros(2, dtype=torch.complex64)
    x = torch.ones(2, requires_grad=True)
    tree = {"a": [x, Pair(torch.ones(2, dtype=torch.float64), "text")], "b": (ids, mask, z, None, 3.5)}
    out = cast_floating(tree, torch.bfloat16)
    assert out["a"][0].dtype == out["a"][1].left.dtype == torch.bfloat16
    assert isinstance(out["a"][1], Pair) and out["a"][1].right == "text"
    assert all(left is right for left, right in zip(out["b"], tree["b"], strict=True))
    out["a"][0].sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
