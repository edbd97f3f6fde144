"""Modules in tiles compute and differentiate as they do in one piece, whatever is around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_storages import LiveStorages
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_sequence import SequenceError, tiled

WIDTH = 8


class Gated(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width, bias=False)
        self.down, self.dropout = nn.Linear(3 * width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(F.silu(self.gate(x)) * self.up(x)))


class Chosen(nn.Module):
    """One of two layers for each token, so that tiles may use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            chosen = (x[..., 0] > 0) == bool(number)
            if chosen.any():
                output[chosen] = layer(x[chosen])
        return output


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": Gated,
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "experts": Chosen,
    "checkpointed": lambda: Checkpointed(Gated(0.5)),
    "identity": nn.Identity,
}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def make(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[kind]().to(dtype)


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def run(call: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """The output, and the gradients of the input and of the parameters."""
    module, x = copy.deepcopy(module), x.detach().clone().requires_grad_()
    output = call(module, x)
    (output * torch.linspace(1, 2, output.numel(), dtype=output.dtype).view(output.shape)).sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in module.parameters())]


def check(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None], bound: float = 1e-12) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other, rtol=bound, atol=bound)


def plain(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ("mlp", "RMSNorm", "LayerNorm", "experts", "identity"))
@pytest.mark.parametrize("shape", ((7, WIDTH), (2, 5, WIDTH), (1, 1, WIDTH)))
@pytest.mark.parametrize("tiles", (1, 3, 50))
def test_output_and_gradients_are_those_of_the_whole(kind: str, shape: tuple[int, ...], tiles: int) -> None:
    module, x = make(kind), data(*shape)
    check(run(lambda module, x: tiled(module, x, tiles=tiles), module, x), run(plain, module, x))


def test_tiles_of_several_samples_are_contiguous_for_modules_that_view_them() -> None:
    x = data(2, 5, WIDTH).requires_grad_()
    output = tiled(lambda x: x.view(-1, WIDTH).exp().view(x.shape), x, tiles=2)
    output.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp(), rtol=1e-12, atol=1e-12)


def test_several_inputs_are_cut_alike_along_any_dimension() -> None:
    x, y = data(2, 7).requires_grad_(), data(2, 7)
    tiled(lambda a, b: a * b + 1, x, y, tiles=3, dim=1).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x * y + 1).detach() * y)


def test_outputs_may_be_stacked() -> None:
    x = data(7, 3).requires_grad_()
    sums = tiled(lambda x: x.square().sum(), x, tiles=3, stack=True)
    torch.testing.assert_close(sums, torch.stack([part.square().sum() for part in x.split(3)]))
    (sums * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach() * torch.tensor([1, 1, 1, 2, 2, 2, 3])[:, None])


def test_parameters_of_a_closure_get_gradients_too() -> None:
    scale, x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True), data(7, 3)
    tiled(lambda x: x * scale, x, tiles=3).sum().backward()
    torch.testing.assert_close(scale.grad, x.sum())


@pytest.mark.parametrize("tiles", (2, 4))
def test_dropout_drops_the_same_in_backward_and_the_generator_goes_on(tiles: int) -> None:
    module = Gated(0.5).double()
    x = data(8, WIDTH).requires_grad_()

    def in_pieces(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return torch.cat([module(part) for part in x.split(8 // tiles)])

    def ours(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return tiled(module, x, tiles=tiles)

    check(run(ours, module, x), run(in_pieces, module, x))
    output = ours(module, x)
    after = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("dropout", (0.0, 0.5))
def test_inside_and_around_activation_checkpointing(reentrant: bool, dropout: float) -> None:
    module, x = Gated(dropout).double(), data(7, WIDTH)

    def around(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return checkpoint(lambda x: tiled(module, x, tiles=3) * 2, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    def inside(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return tiled(Checkpointed(module), x, tiles=3) * 2

    def alone(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return tiled(module, x, tiles=3) * 2

    theirs = run(alone, module, x)
    check(run(around, module, x), theirs)
    check(run(inside, module, x), theirs)


@pytest.mark.parametrize("cached", (True, False))
@pytest.mark.parametrize("kind", ("mlp", "RMSNorm", "LayerNorm"))
def test_autocast_is_that_of_forward(kind: str, cached: bool) -> None:
    module, x = make(kind, torch.float32), data(7, WIDTH).float()

    def under(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run_under(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                return call(module, x)

        return run_under

    ours = run(under(lambda module, x: tiled(module, x, tiles=7)), module, x)
    in_pieces = run(under(lambda module, x: torch.cat([module(part) for part in x.split(1)])), module, x)
    assert ours[0] is not None and in_pieces[0] is not None
    assert ours[0].dtype == in_pieces[0].dtype
    check(ours, in_pieces, 1e-2)
    assert torch.equal(ours[0], in_pieces[0])


def test_with_gradients_disabled_nothing_is_kept() -> None:
    module, x = make("mlp"), data(7, WIDTH).requires_grad_()
    with torch.no_grad():
        output = tiled(module, x, tiles=3)
    assert not output.requires_grad
    torch.testing.assert_close(output, module(x).detach(), rtol=1e-12, atol=1e-12)


def test_a_frozen_module_and_an_input_without_gradients() -> None:
    module, x = make("mlp").requires_grad_(False), data(7, WIDTH)
    assert not tiled(module, x, tiles=3).requires_grad
    x.requires_grad_()
    tiled(module, x, tiles=3).sum().backward()
    mine, x.grad = x.grad, None
    module(x).sum().backward()
    torch.testing.assert_close(mine, x.grad, rtol=1e-12, atol=1e-12)


def test_hooks_on_parameters_and_accumulation_happen_once() -> None:
    module, x = nn.Linear(WIDTH, WIDTH).double(), data(9, WIDTH)
    plain_module = copy.deepcopy(module)
    seen: list[str] = []
    for one in (module, plain_module):
        one.weight.register_hook(lambda gradient: gradient.clamp(-1, 1) * 2)
    module.weight.register_hook(lambda _: seen.append("hook"))
    module.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    tiled(module, x, tiles=4).sum().backward()
    plain_module(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, plain_module.weight.grad, rtol=1e-12, atol=1e-12)
    assert seen == ["hook", "accumulated"]


def test_saved_tensor_hooks_around_see_the_input_alone() -> None:
    module, x = make("mlp"), data(8, WIDTH).requires_grad_()
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tiled(module, x, tiles=4).sum().backward()
    assert packed == [x.shape]


def test_a_tensor_computed_outside_from_parameters_is_refused() -> None:
    weight, x = data(WIDTH, WIDTH).requires_grad_(), data(8, WIDTH)
    outside = weight.exp()
    with pytest.raises(SequenceError, match="computed from parameters or activations before the call"):
        tiled(lambda x: x @ outside, x, tiles=2).sum().backward()


def test_a_second_derivative_is_refused() -> None:
    module, x = make("mlp"), data(8, WIDTH).requires_grad_()
    with pytest.raises(SequenceError, match="create_graph=True reached a computation in tiles"):
        torch.autograd.grad(tiled(module, x, tiles=2).sum(), x, create_graph=True)


def test_compiled_code_calls_it_as_it_is() -> None:
    module, x = make("mlp"), data(8, WIDTH)

    def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return tiled(module, x, tiles=3) * 2

    check(run(torch.compile(call, backend="eager"), module, x), run(call, module, x))


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    (
        ((), {"tiles": 2}, "at least one tensor"),
        ((torch.ones(3, 2),), {"tiles": 0}, "1 or more tiles, got 0"),
        (("words",), {"tiles": 2}, "input 0 to be a tensor, got str"),
        ((torch.ones(3),), {"tiles": 2}, r"to have a dimension -2, got the shape \(3,\)"),
        ((torch.ones(3, 2), torch.ones(4, 2)), {"tiles": 2}, r"equal size along dimension -2, got \[3, 4\]"),
    ),
)
def test_inputs_that_do_not_fit_are_refused(inputs: tuple[Any, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(SequenceError, match=words):
        tiled(nn.Identity(), *inputs, **options)


def test_an_output_of_another_size_is_refused() -> None:
    with pytest.raises(SequenceError, match=r"Flatten to return 2 positions along dimension -2.*the shape \(6,\)"):
        tiled(nn.Flatten(0), torch.ones(4, 3), tiles=2)


@pytest.mark.parametrize("backward", (False, True))
def test_activations_are_those_of_one_tile(backward: bool) -> None:
    def peak(tokens: int, tiles: int) -> int:
        module, x = Gated(width=64), torch.randn(tokens, 64).requires_grad_()
        with LiveStorages() as live:
            output = tiled(module, x, tiles=tiles)
            if backward:
                output.sum().backward()
        return live.peak - x.nbytes * (2 if backward else 1)  # the output; the gradient of the input

    assert peak(1024, 16) <= peak(128, 2) * 1.05
