"""The warning of tensors and arrays that user code took of parameters before they were sharded."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from partition_models import cut, groups
from torch import nn

from zero_comm import run_ranks
from zero_partition import Init, full_parameter


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Collect what the package logs in the block."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zero_partition")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))


def all_in_one(model: nn.Module) -> torch.Tensor:
    """Make every parameter and floating buffer a slice of one tensor, and return that."""
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    flat = torch.cat([t.detach().flatten() for t in tensors])
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.data = piece.view(tensor.shape)
    return flat


Kept = Callable[[nn.Module], Any]
SEEN: dict[str, tuple[Kept, int]] = {
    "data": (lambda model: model[2].bias.data, 1),
    "an element": (lambda model: model[2].bias.detach()[1:2], 1),
    "array": (lambda model: model[2].bias.detach().numpy(), 1),
    "attribute": (lambda model: setattr(model, "last", model[2].bias.data), 1),
    "state dict": (lambda model: model.state_dict(), 6),
    "flat": (all_in_one, 6),
}


@pytest.mark.parametrize("name", SEEN)
def test_an_alias_from_before_is_said_once_with_the_first_name_and_their_number(name: str) -> None:
    keep, number = SEEN[name]
    model = layers()
    kept = keep(model)
    with warnings() as said:
        cut(model, 2)
    named = "parameter '2.bias'" if number == 1 else f"parameter '0.weight' and {number - 1} more"
    assert len(said) == 1 and said[0].startswith(f"{named}: ")
    assert "after initialize" in said[0] and "engine.full_param(p)" in said[0]
    del kept


def in_a_cycle(model: nn.Module) -> None:
    cycle: list[Any] = [model[0].weight.data]
    cycle.append(cycle)


def tied(model: nn.Module) -> None:
    model[2].weight = model[0].weight


def of_an_array(model: nn.Module) -> Any:
    array = numpy.ones(5, dtype=numpy.float32)
    model[0].bias.data = torch.from_numpy(array)
    return array


def from_a_file(model: nn.Module) -> None:
    """Load all values as slices of one mapped file."""
    with tempfile.NamedTemporaryFile() as file:
        torch.save(model.state_dict(), file.name)
        model.load_state_dict(torch.load(file.name, mmap=True, weights_only=True), assign=True)


UNSEEN: dict[str, Kept] = {
    "nothing": lambda model: None,
    "tied": tied,
    "slices of what is gone": lambda model: all_in_one(model) is None,
    "garbage": in_a_cycle,
    "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
    "parameters": lambda model: dict(model.named_parameters()),
    "copy": copy.deepcopy,
    "copies": lambda model: {name: value.clone() for name, value in model.state_dict().items()},
    "gradients": lambda model: model(torch.ones(2, 5)).sum().backward(),
    "shared memory": lambda model: model.share_memory() is None,
    "array it was made of": of_an_array,
    "file": from_a_file,
    "cast": lambda model: model.bfloat16().float() is None,
    "spectral norm": lambda model: nn.utils.parametrizations.spectral_norm(model[0]),
    "former spectral norm": lambda model: nn.utils.spectral_norm(model[0]),
    "weight norm": lambda model: nn.utils.parametrizations.weight_norm(model[0]),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_nothing_is_said_of_memory_that_no_other_code_uses(name: str) -> None:
    model = layers()
    kept = UNSEEN[name](model)
    with warnings() as said:
        cut(model, 2)
    assert said == []
    del kept


def said_by_rank(stage: int) -> dict[str, list[str]]:
    """Warnings of models with and without an alias; of one built by `Init`; of one that had an engine before."""
    channels, found = groups(), {}
    model = layers()
    with warnings() as found["plain"]:
        parts = cut(model, stage)
        kept = model[0].weight.data if stage < 3 else None
        parts.close()
    with warnings() as found["again"]:
        again = cut(model, stage)
        again.close()
    with warnings() as found["kept"], torch.no_grad():
        other = layers()
        kept = other[0].weight.data
        cut(other, stage)
    with Init(channels.gather, channels.control):
        model = layers()
    with warnings() as found["init"]:
        parts = cut(model, stage)
    found["value"] = [str(bool(full_parameter(parts, model[0].weight).isfinite().all()))]
    del kept
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_rank_0_alone_warns_and_memory_that_a_closed_engine_left_is_no_alias(stage: int) -> None:
    for rank, found in enumerate(run_ranks(said_by_rank, 2, stage)):
        assert len(found.pop("kept")) == (rank == 0)
        assert found.pop("value") == ["True"] and not any(found.values()), found
