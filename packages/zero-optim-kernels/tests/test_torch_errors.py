"""What the torch optimizers refuse, by the parameter's name and before anything is written."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from zero_optim_kernels.torch import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW, CPULamb, CPULion  # noqa: E402

EVERY_CLASS = pytest.mark.parametrize("ours", [CPUAdam, CPUAdamW, CPUAdagrad, CPUSGD, CPULion, CPULamb])


def good() -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    return param


@EVERY_CLASS
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch.ones(4, device="meta"), ValueError, "on the CPU, got device meta"),
        (lambda: torch.ones(4, dtype=torch.float16), TypeError, "float16"),
        (lambda: torch.ones(4, dtype=torch.complex64), TypeError, "complex64"),
        (lambda: torch.ones(4, 4).t()[:, :2], ValueError, "contiguous"),
    ],
)
def test_parameters_that_the_kernels_cannot_update_are_refused_at_once(
    ours: Any, make: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=f"parameter 'w'.*{message}"):
        ours([("v", good()), ("w", torch.nn.Parameter(make()))], lr=1e-3)


@EVERY_CLASS
@pytest.mark.parametrize("options", [{"lr": -1.0}, {"lr": float("nan")}, {"weight_decay": -0.1}], ids=str)
def test_negative_options_are_refused(ours: Any, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ours([good()], **{"lr": 1e-3, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -1.0)},
        {"eps": -1.0},
        {"state_dtype": "int7"},
        {"state_dtype": 8},
        {"bf16_weights": "rounded"},
        {"threads": -1},
    ],
    ids=str,
)
def test_options_outside_their_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CPUAdamW([good()], lr=1e-3, **options)


def test_options_that_only_torch_has_are_refused() -> None:
    param = good()
    optimizer = CPUAdam([param])
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.step()
    with pytest.raises(ValueError, match="nesterov"):
        CPUSGD([param], nesterov=True)


def test_a_refused_group_is_not_added() -> None:
    optimizer = CPUAdamW([good()])
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [good()], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("options", [{"state_dtype": "int8"}, {"state_dtype": "bfloat16"}], ids=str)
def test_float64_parameters_have_float64_state_only(options: dict[str, str]) -> None:
    with pytest.raises(TypeError, match="float64"):
        CPUAdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.float64))], **options)


@EVERY_CLASS
def test_sparse_gradients_are_refused_before_anything_is_written(ours: Any) -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    first = good()
    embedding(torch.tensor([1])).sum().backward()
    optimizer = ours([first, embedding.weight], lr=0.1)
    with pytest.raises(TypeError, match=r"parameter 1 of group 0: sparse gradients"):
        optimizer.step()
    assert torch.equal(first, torch.ones(4))


@EVERY_CLASS
def test_an_error_in_the_last_group_leaves_the_first_untouched(ours: Any) -> None:
    first, second = good(), torch.nn.Parameter(torch.ones(4, 4))
    optimizer = ours([{"params": [first]}, {"params": [second]}], lr=0.1)
    second.grad = torch.ones(4, 8)[:, ::2]
    with pytest.raises(ValueError, match="parameter 0 of group 1: expected a contiguous gradient"):
        optimizer.step()
    assert torch.equal(first, torch.ones(4))
    second.grad = torch.ones(4, 4)
    optimizer.step()
    assert not torch.equal(first, torch.ones(4))


def test_state_of_another_shape_is_refused() -> None:
    param, other = good(), torch.nn.Parameter(torch.ones(5))
    other.grad = torch.ones(5)
    source = CPUAdamW([other])
    source.step()
    with pytest.raises(ValueError, match="shape"):
        CPUAdamW([param]).load_state_dict(source.state_dict())


def test_8_bit_state_without_its_scales_is_refused() -> None:
    param = good()
    source = CPUAdamW([param], state_dtype="int8")
    source.step()
    saved = source.state_dict()
    del saved["state"][0]["exp_avg_scale"]
    with pytest.raises(ValueError, match="exp_avg_scale"):
        CPUAdamW([param]).load_state_dict(saved)
