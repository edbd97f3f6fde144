"""Cross entropy in tiles is the whole one, to the gradients of everything, and never holds the whole logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_storages import LiveStorages
from torch import nn

from zero_sequence import SequenceError, tiled_cross_entropy

WIDTH, CLASSES = 6, 11


class SoftCapped(nn.Module):
    """A head with a bias, a scale and soft-capping."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.project(hidden) * self.scale / 3) * 3


def make_head(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "capped":
        return SoftCapped()
    return nn.Linear(WIDTH, CLASSES, bias=kind == "biased", dtype=torch.float64)


def make_data(*shape: int, ignored: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, shape, generator=generator)
    return hidden, labels.masked_fill(torch.rand(shape, generator=generator) < ignored, -100)


def whole(hidden: torch.Tensor, head: Any, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    """The loss from torch's own functions, on all logits at once."""
    z, items = options.pop("z_loss", 0.0), options.pop("num_items", None)
    logits, labels = head(hidden.reshape(-1, WIDTH)), labels.reshape(-1)
    valid = labels != options.get("ignore_index", -100)
    reduction = "sum" if items is not None else options.pop("reduction", "mean")
    loss = F.cross_entropy(logits, labels, reduction=reduction, **options)
    squares = z * logits.logsumexp(-1).square().where(valid, 0).sum()
    if items is not None:
        return (loss + squares) / items
    weight = options.get("weight")
    counts = valid.sum() if weight is None else weight[labels.where(valid, 0)].where(valid, 0).sum()
    return loss + (squares / counts if reduction == "mean" else squares)


def run(
    loss_of: Any, head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, **options: Any
) -> list[torch.Tensor]:
    head, hidden = copy.deepcopy(head), hidden.clone().requires_grad_()
    loss = loss_of(hidden, head, labels, **options)
    (loss * 3).backward()
    return [loss.detach(), hidden.grad, *(p.grad for p in head.parameters())]  # type: ignore[list-item]


def check(head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, tile_tokens: int, **options: Any) -> None:
    ours = run(tiled_cross_entropy, head, hidden, labels, tile_tokens=tile_tokens, **options)
    for mine, theirs in zip(ours, run(whole, head, hidden, labels, **options), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("kind", ("plain", "biased", "capped"))
@pytest.mark.parametrize("shape", ((7,), (3, 5), (2, 3, 4), (1,)))
@pytest.mark.parametrize("tile_tokens", (1, 4, 100))
def test_loss_and_gradients_are_those_of_the_whole(kind: str, shape: tuple[int, ...], tile_tokens: int) -> None:
    check(make_head(kind), *make_data(*shape), tile_tokens)


@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize(("smoothing", "z"), ((0.0, 0.1), (0.2, 0.0), (0.2, 0.1), (1.0, 0.0)))
def test_smoothing_z_loss_and_class_weights(reduction: str, weighted: bool, smoothing: float, z: float) -> None:
    weight = torch.linspace(0.2, 2, CLASSES, dtype=torch.float64) if weighted else None
    options = {"reduction": reduction, "weight": weight, "label_smoothing": smoothing, "z_loss": z}
    check(make_head("biased"), *make_data(3, 5), 4, **options)


@pytest.mark.parametrize("items", (5, 2.5, torch.tensor(7)))
def test_a_given_number_of_items_divides_the_sum(items: Any) -> None:
    check(make_head("plain"), *make_data(3, 5), 4, num_items=items, z_loss=0.1)


def test_another_label_may_be_the_ignored_one() -> None:
    hidden, labels = make_data(9, ignored=0.0)
    check(make_head("plain"), hidden, labels, 4, ignore_index=3)


@pytest.mark.parametrize("smoothing", (0.0, 0.1))
@pytest.mark.parametrize("options", ({"reduction": "mean"}, {"reduction": "sum"}, {"num_items": 4}))
def test_all_labels_ignored_give_no_gradient(smoothing: float, options: dict[str, Any]) -> None:
    hidden, labels = make_data(7, ignored=2.0)
    head = make_head("plain")
    loss, *gradients = run(
        tiled_cross_entropy, head, hidden, labels, tile_tokens=3, label_smoothing=smoothing, **options
    )
    theirs = run(whole, head, hidden, labels, label_smoothing=smoothing, **options)[0]
    torch.testing.assert_close(loss, theirs, equal_nan=True)
    assert all(not gradient.any() for gradient in gradients)


def test_no_tokens_at_all() -> None:
    hidden, labels = make_data(0)
    check(make_head("plain"), hidden, labels, 4, reduction="sum")


def test_infinite_logits_are_classes_that_cannot_be() -> None:
    head, (hidden, labels) = make_head("plain"), make_data(7)

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return F.pad(self.head(hidden), (0, 2), value=-torch.inf)

    check(Padded(), hidden, labels, 3)


@pytest.mark.parametrize("frozen", ("head", "hidden"))
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    head, (hidden, labels) = make_head("biased"), make_data(7)
    head.requires_grad_(frozen != "head")
    hidden.requires_grad_(frozen != "hidden")
    tiled_cross_entropy(hidden, head, labels, tile_tokens=3).backward()
    mine = [hidden.grad, *(p.grad for p in head.parameters())]
    hidden.grad = None
    head.zero_grad()
    whole(hidden, head, labels).backward()
    for ours, theirs in zip(mine, [hidden.grad, *(p.grad for p in head.parameters())], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_without_gradients_there_is_no_graph() -> None:
    head, (hidden, labels) = make_head("capped"), make_data(7)
    with torch.no_grad():
        loss = tiled_cross_entropy(hidden, head, labels, tile_tokens=3)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, whole(hidden, head, labels).detach(), rtol=1e-12, atol=1e-12)


def test_a_graph_may_be_used_twice() -> None:
    head, (hidden, labels) = make_head("capped"), make_data(7)
    hidden.requires_grad_()
    loss = tiled_cross_entropy(hidden, head, labels, tile_tokens=3)
    first = torch.autograd.grad(loss, [hidden, *head.parameters()], retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, [hidden, *head.parameters()])))


def test_narrow_logits_are_widened_and_their_gradients_summed_in_float32() -> None:
    torch.manual_seed(0)
    head, hidden = nn.Linear(WIDTH, CLASSES, dtype=torch.bfloat16), torch.randn(512, WIDTH).bfloat16()
    labels = torch.randint(0, CLASSES, (512,))
    loss = tiled_cross_entropy(hidden, head, labels, tile_tokens=2)
    assert loss.dtype == torch.float32
    loss.backward()
    exact = copy.deepcopy(head).double()
    F.cross_entropy(exact(hidden.double()), labels).backward()
    assert head.weight.grad is not None and exact.weight.grad is not None
    error = (head.weight.grad - exact.weight.grad).abs().max() / exact.weight.grad.abs().max()
    assert error < 0.01  # bfloat16 sums over 256 tiles are off by a tenth


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"labels": torch.zeros(4, dtype=torch.long)}, r"got \(4,\) for \(7, 6\)"),
        ({"labels": torch.zeros(7)}, "class indices, got torch.float32"),
        ({"tile_tokens": 0}, "tile_tokens of 1 or more, got 0"),
        ({"label_smoothing": 2.0}, "from 0 to 1, got 2.0"),
        ({"reduction": "none"}, "'mean' or 'sum', got 'none'"),
        ({"reduction": "sum", "num_items": 3}, "leave out reduction='sum'"),
        ({"head": lambda hidden: hidden.sum(-1)}, r"<lambda> to return logits \(3, classes\).*got \(3,\)"),
        ({"head": lambda hidden: (hidden,)}, "one tensor for a tile, got tuple"),
    ),
)
def test_what_does_not_fit_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    hidden, labels = make_data(7)
    given = {"hidden": hidden, "labels": labels, "head": make_head("plain"), "tile_tokens": 3, **options}
    with pytest.raises(SequenceError, match=words):
        tiled_cross_entropy(**given)


# -- memory ----------------------------------------------------------------------------------------------------------


def peak_of_tokens(tokens: int, tile_tokens: int, dtype: torch.dtype, **options: Any) -> LiveStorages:
    """Return the storages of logits that live during a loss and its backward."""
    head = nn.Linear(4, 1000, dtype=dtype)
    hidden, labels = torch.randn(tokens, 4, dtype=dtype).requires_grad_(), torch.randint(0, 1000, (tokens,))
    with LiveStorages(lambda tensor: tensor.dim() == 2 and tensor.size(1) == 1000) as logits:
        tiled_cross_entropy(hidden, head, labels, tile_tokens=tile_tokens, **options).backward()
    return logits


@pytest.mark.parametrize("options", ({}, {"label_smoothing": 0.1, "z_loss": 0.1}), ids=("plain", "all terms"))
@pytest.mark.parametrize(("dtype", "bytes_per_logit"), ((torch.float32, 4 + 4), (torch.bfloat16, 2 + 4)))
@pytest.mark.parametrize("tokens", (256, 2048))
def test_logits_are_one_tile_and_one_copy_of_it(
    tokens: int, dtype: torch.dtype, bytes_per_logit: int, options: dict[str, Any]
) -> None:
    logits = peak_of_tokens(tokens, 32, dtype, **options)
    assert logits.largest == 32 * 1000 * 4
    assert logits.peak == 32 * 1000 * bytes_per_logit


def test_activations_of_the_loss_do_not_grow_with_the_sequence() -> None:
    def peak(tokens: int) -> int:
        head = nn.Linear(4, 1000)
        hidden, labels = torch.randn(tokens, 4).requires_grad_(), torch.randint(0, 1000, (tokens,))
        with LiveStorages() as live:
            tiled_cross_entropy(hidden, head, labels, tile_tokens=32).backward()
        own = hidden.nbytes + labels.nbytes * 2  # the gradient; which labels count, and where
        return live.peak - own

    short, long = peak(256), peak(4096)
    assert long <= short * 1.05
