"""`Init` with parameters whose memory other code holds, deep copies inside it, and errors before an engine exists."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from partition_models import cut, groups
from torch import nn

from zero_comm import run_ranks
from zero_partition import Init, PartitionError, ShardedOptimizer, full_parameter, gathered_anywhere


class Rows(nn.Module):
    """Two layers; ``edit`` is what the constructor does to them once both are attached."""

    def __init__(self, edit: Callable[[Rows], Any] = lambda _: None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.kept: list[Any] = [edit(self)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


def tie(model: Rows) -> None:
    model.last.weight.data = model.first.weight.data


def tie_transposed(model: Rows) -> None:
    model.last.weight.data = model.first.weight.data.t()


def make_another_parameter(model: Rows) -> None:
    model.last.weight = nn.Parameter(model.first.weight)


def register_alias(model: Rows) -> None:
    model.register_buffer("start", model.first.weight.detach())


TIES: dict[str, tuple[Callable[[Rows], None], str]] = {
    "tied": (tie, "'last.weight'"),
    "tied by a transpose": (tie_transposed, "'last.weight'"),
    "a parameter made of another": (make_another_parameter, "'last.weight'"),
    "a buffer": (register_alias, "'start'"),
}


def ties_refused() -> dict[str, str]:
    channels = groups()
    said: dict[str, str] = {}
    for name, (edit, _) in TIES.items():
        with Init(channels.gather, channels.control):
            model = Rows(edit)
        try:
            cut(model, 3)
        except PartitionError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tie_by_memory_made_inside_init_is_refused_with_both_names(world_size: int) -> None:
    for said in run_ranks(ties_refused, world_size):
        for name, (_, other) in TIES.items():
            assert "'first.weight'" in said[name] and other in said[name] and "share memory" in said[name], name


def alias_before_attaching() -> nn.Module:
    layer = nn.Linear(5, 5)
    alias = layer.weight.data
    model = nn.Sequential(layer, nn.Linear(5, 3))
    alias.fill_(0.25)
    return model


def array_before_attaching() -> nn.Module:
    layer = nn.Linear(5, 5)
    array = layer.weight.detach().numpy()
    model = nn.Sequential(layer, nn.Linear(5, 3))
    array[:] = 0.25
    return model


def alias_of_what_was_sharded() -> nn.Module:
    model = Rows(lambda rows: rows.first.weight.data[1:3])
    model.kept[0].fill_(0.25)
    return model


def flat_memory() -> nn.Module:
    layer = nn.Linear(5, 5)
    flat = torch.arange(30.0)
    layer.weight, layer.bias = nn.Parameter(flat[:25].view(5, 5)), nn.Parameter(flat[25:])
    model = nn.Sequential(layer)
    flat.mul_(0.5)
    return model


def array_after_the_end() -> nn.Module:
    model = Rows(lambda rows: rows.last.bias.detach().numpy())
    model.later = lambda: model.kept[0].fill(7.0)  # type: ignore[assignment]
    return model


ALIASES = [
    alias_before_attaching,
    array_before_attaching,
    alias_of_what_was_sharded,
    flat_memory,
    array_after_the_end,
]


def later_writes(model: nn.Module) -> None:
    if hasattr(model, "later"):
        model.later()  # type: ignore[operator]


def written_through_aliases() -> dict[str, Any]:
    channels = groups()
    found: dict[str, Any] = {}
    for build in ALIASES:
        torch.manual_seed(3)
        with Init(channels.gather, channels.control):
            model = build()
        released = [bool(p.isnan().all()) for p in model.parameters()]
        later_writes(model)
        parts = cut(model, 3)
        weights = {n: full_parameter(parts, p) for n, p in model.named_parameters()}
        found[build.__name__] = (weights, released)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_writes_through_an_alias_from_before_the_shard_was_cut_count(world_size: int) -> None:
    expected = {}
    for build in ALIASES:
        torch.manual_seed(3)
        model = build()
        later_writes(model)
        expected[build.__name__] = {n: p.detach().double() for n, p in model.named_parameters()}
    for found in run_ranks(written_through_aliases, world_size):
        for name, reference in expected.items():
            weights, released = found[name]
            assert all(torch.equal(weights[n], p) for n, p in reference.items()), name
            held_still = name in ("alias_of_what_was_sharded", "array_after_the_end")
            assert sum(released) == (len(released) - held_still if world_size > 1 else 0), name


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def held_to_the_end() -> list[list[str]]:
    channels = groups()
    lines = Lines()
    logging.getLogger("zero_partition").addHandler(lines)
    said = []
    for edit in (lambda rows: rows.first.weight.data, lambda _: None):
        with Init(channels.gather, channels.control):
            model = Rows(edit)
        said.append(list(lines.said))
        del model
        lines.said.clear()
    logging.getLogger("zero_partition").removeHandler(lines)
    return said


def test_that_a_parameter_stays_full_is_said_once_with_its_name() -> None:
    first, second = run_ranks(held_to_the_end, 2)
    assert len(first[0]) == 1 and "'first.weight of Rows'" in first[0][0] and "until initialize" in first[0][0]
    assert first[1] == [] and second == [[], []]


class Encoder(nn.Module):
    """What `nn.TransformerEncoder`, `nn.Transformer` and Transformers' clones of layers do."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(4), enable_nested_tensor=False)
        self.both = nn.Transformer(4, 2, 1, 2, 8, 0.0, batch_first=True)
        self.blocks = nn.ModuleList([copy.deepcopy(self.encoder.layers[0]) for _ in range(2)])
        self.rows = Rows()
        self.twin = copy.deepcopy(self.rows)
        nn.init.normal_(self.twin.first.weight)
        self.odd = copy.deepcopy(self.rows.last.weight)
        self.table = copy.deepcopy(nn.Embedding(7, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.both(x, self.encoder(x))
        for block in self.blocks:
            x = block(x)
        return self.twin(nn.functional.pad(x, (0, 1))) @ self.odd


def with_deep_copies() -> dict[str, Any]:
    channels = groups()
    torch.manual_seed(3)
    with Init(channels.gather, channels.control):
        model = Encoder()
        released = {n for n, p in model.named_parameters() if p.numel() > 1 and bool(torch.as_tensor(p.stride()).any())}
    after = copy.deepcopy(model)
    with gathered_anywhere([model.rows.last.weight], modifier_rank=0):
        model.rows.last.weight.data.fill_(2.0)
    parts, others = cut(model, 3), cut(after, 3)
    return {
        "full inside": released,
        "weights": {n: full_parameter(parts, p) for n, p in model.named_parameters()},
        "copies": {n: full_parameter(others, p) for n, p in after.named_parameters()},
        "output": model(torch.ones(2, 3, 4, dtype=torch.float64)).detach(),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_deep_copies_of_sharded_modules_have_the_values_and_are_sharded(world_size: int) -> None:
    torch.manual_seed(3)
    reference = Encoder().double()
    before = {n: p.detach().clone() for n, p in reference.named_parameters()}
    with torch.no_grad():
        reference.rows.last.weight.fill_(2.0)
    for found in run_ranks(with_deep_copies, world_size):
        for name, p in reference.named_parameters():
            assert torch.equal(found["weights"][name], p), name
            assert torch.equal(found["copies"][name], before[name]), name
        expected = reference(torch.ones(2, 3, 4, dtype=torch.float64))
        assert torch.allclose(found["output"], expected, rtol=0, atol=1e-12)


def made_inside_gathered() -> list[bool]:
    channels = groups()
    torch.manual_seed(3)
    with Init(channels.gather, channels.control):
        model = Rows()
    with gathered_anywhere(model.parameters()):
        with torch.no_grad():
            model.last.bias.fill_(2.0)
        parts = cut(model, 3)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    torch.manual_seed(3)
    reference = Rows().double()
    with torch.no_grad():
        reference.last.bias.fill_(2.0)
    reference(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return [torch.allclose(full_parameter(parts, p), q, rtol=0, atol=1e-12) for p, q in pairs]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_engine_made_inside_gathered_takes_the_values_that_are_there(world_size: int) -> None:
    assert run_ranks(made_inside_gathered, world_size) == [[True] * 4] * world_size


USES: dict[str, Callable[[Rows], Any]] = {
    "forward": lambda model: model(torch.ones(2, 5)),
    "arithmetic": lambda model: model.first.weight + 1,
    "transpose": lambda model: model.first.weight.t(),
    "index": lambda model: model.first.weight[0],
    "data": lambda model: model.first.weight.data.sum(),
    "write": lambda model: model.first.weight.data.mul_(2),
    "numpy": lambda model: model.first.weight.detach().numpy(),
    "save": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "save of the model": lambda model: torch.save(model, io.BytesIO()),
    "load": lambda model: model.load_state_dict({n: torch.ones(p.shape) for n, p in model.named_parameters()}),
    "assignment": lambda model: setattr(model.last.weight, "data", model.first.weight.data),
}


def used_without_an_engine() -> tuple[dict[str, str], bool]:
    channels = groups()
    with Init(channels.gather, channels.control):
        model = Rows()
    said = {}
    for name, use in USES.items():
        try:
            use(model)
        except Exception as error:
            said[name] = str(error)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    parts = cut(model, 3)
    return said, shapes["first.weight"] == (5, 5) and bool(full_parameter(parts, model.first.weight).isfinite().all())


def test_uses_between_init_and_initialize_are_refused_with_the_name_and_the_way_out() -> None:
    for said, goes_on in run_ranks(used_without_an_engine, 2):
        for name in USES:
            text = said[name]
            assert ".weight of Rows'" in text and "zero_core.initialize" in text, (name, text)
            assert "zero_core.gathered(" in text, (name, text)
        assert goes_on
