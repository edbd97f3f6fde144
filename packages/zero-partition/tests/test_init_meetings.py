"""`Init` where one rank alone initialises what was sharded already, and where ranks build different models."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from partition_models import cut, groups
from torch import nn

from zero_comm import CommError, run_ranks
from zero_partition import Init, PartitionError, full_parameter, gathered_anywhere


class Pair(nn.Module):
    """Two layers and a parameter of its own; ``edit`` runs at the end of the constructor."""

    def __init__(self, edit: Callable[[Pair, bool], None] | None = None, mine: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = nn.Parameter(torch.ones(3, 4))
        if edit is not None:
            edit(self, mine)
        self.c = nn.Linear(4, 4)


def one(model: Pair, mine: bool) -> None:
    if mine:
        nn.init.normal_(model.a.weight)


def one_then_all(model: Pair, mine: bool) -> None:
    one(model, mine)
    nn.init.uniform_(model.b.weight)
    nn.init.uniform_(model.a.bias)


def the_same_then_all(model: Pair, mine: bool) -> None:
    one(model, mine)
    with torch.no_grad():
        model.a.weight.mul_(0.5)
        model.b.weight.copy_(model.a.weight + model.own.sum())


def several(model: Pair, mine: bool) -> None:
    if mine:
        model.apply(draw)
        with torch.no_grad():
            model.own.copy_(model.a.weight[:3] * model.b.weight[1:])


def assigned(model: Pair, mine: bool) -> None:
    if mine:
        model.a.weight.data = torch.full((4, 4), 3.0)
        model.b.bias.data.fill_(2.0)


def before_a_gather(model: Pair, mine: bool) -> None:
    one(model, mine)
    with gathered_anywhere([model.b.weight, model.a.weight]):
        seen = model.a.weight.detach().clone()
    with torch.no_grad():
        model.b.weight.copy_(seen)
    if mine:
        nn.init.normal_(model.b.bias)
    with gathered_anywhere([model.a.bias], modifier_rank=0):
        model.a.bias.data.fill_(4.0)


def inside_a_gather(model: Pair, mine: bool) -> None:
    with gathered_anywhere([model.a.weight], modifier_rank=0):
        one(model, mine)
        if mine:
            nn.init.normal_(model.b.weight)


def draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.uniform_(module.bias)


IN_THE_CONSTRUCTOR = [one, one_then_all, the_same_then_all, several, assigned, before_a_gather, inside_a_gather]


def after_it(model: nn.Module, mine: bool) -> None:
    """As `post_init` of Transformers."""
    if mine:
        model.apply(draw)


def built(edit: Callable[[Pair, bool], None] | None, mine: bool) -> nn.Module:
    if edit is not None:
        return nn.Sequential(Pair(edit, mine), nn.Linear(4, 2))
    model = nn.Sequential(Pair(), nn.Linear(4, 2), Pair())
    after_it(model, mine)
    return model


class Warned(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def one_rank_initialises(who: int, bound: int) -> list[dict[str, Any]]:
    channels = groups()
    warned = Warned()
    logging.getLogger("zero_partition").addHandler(warned)
    found = []
    for edit in (*IN_THE_CONSTRUCTOR, None):
        torch.manual_seed(3)
        with Init(channels.gather, channels.control, max_full_numel=bound):
            model = built(edit, channels.gather.rank == who)
        released = all(bool(p.isnan().all()) for p in model.parameters())
        parts = cut(model, 3)
        weights = {n: full_parameter(parts, p) for n, p in model.named_parameters()}
        found.append({"weights": weights, "released": released, "said": list(warned.lines)})
        warned.lines.clear()
    logging.getLogger("zero_partition").removeHandler(warned)
    return found


@pytest.mark.parametrize(
    ("world_size", "who", "bound"), [(2, 0, 1 << 26), (2, 0, 8), (2, 1, 8), (3, 0, 20), (3, 2, 20)]
)
def test_what_one_rank_alone_initialises_is_as_if_all_had_rank_0s_values(world_size: int, who: int, bound: int) -> None:
    expected = []
    for edit in (*IN_THE_CONSTRUCTOR, None):
        torch.manual_seed(3)
        expected.append({n: p.detach().double() for n, p in built(edit, who == 0).named_parameters()})
    for rank, found in enumerate(run_ranks(one_rank_initialises, world_size, who, bound, timeout=60)):
        for edit, facts, reference in zip((*IN_THE_CONSTRUCTOR, None), found, expected, strict=True):
            name = "after it" if edit is None else edit.__name__
            assert all(torch.equal(facts["weights"][n], p) for n, p in reference.items()), name
            assert facts["released"], name
            assert len(facts["said"]) == int(rank == 0), (name, facts["said"])


def different_models(kind: str) -> str:
    channels = groups()
    first = channels.gather.rank == 0
    try:
        with Init(channels.gather, channels.control):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            if kind == "a module more" and first:
                model.append(nn.Linear(4, 4))
            if kind == "another shape" and first:
                model[1].weight.data = torch.ones(2, 4)
            with gathered_anywhere([model[0].weight]) if kind == "a gather" and first else nullcontext():
                pass
    except (CommError, PartitionError) as error:
        return str(error)
    return "none"


@pytest.mark.parametrize("kind", ["a module more", "another shape", "a gather"])
def test_ranks_that_build_different_models_all_hear_what_each_was_doing(kind: str) -> None:
    named = {"a module more": "2.weight of Sequential", "another shape": "'1.weight of Sequential'"}
    for text in run_ranks(different_models, 2, kind, timeout=30):
        assert named.get(kind, "gather 0.weight of Sequential") in text, text


def a_copy_on_one_rank() -> tuple[int, bool]:
    """Records that one rank alone has made do not part the ranks in the next `Init`."""
    channels = groups()
    with Init(channels.gather, channels.control):
        model = Pair()
    kept = copy.deepcopy(model) if dist.get_rank() == 0 else None
    with Init(channels.gather, channels.control):
        other = built(one, dist.get_rank() == 0)
    parts = cut(other, 3)
    finite = all(bool(full_parameter(parts, p).isfinite().all()) for p in other.parameters())
    return 0 if kept is None else 1, finite


def test_a_copy_that_one_rank_made_after_init_does_not_part_the_ranks_in_the_next_one() -> None:
    assert run_ranks(a_copy_on_one_rank, 2, timeout=30) == [(1, True), (0, True)]
