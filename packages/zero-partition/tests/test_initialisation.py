"""`Init`: models built in slices hold what one process with the same seed would have drawn."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from partition_models import cut, gathered_bytes, groups
from torch import nn

from zero_comm import run_ranks
from zero_partition import Init, PartitionError, ShardedOptimizer, full_parameter, gathered_anywhere


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.full((width,), 0.5))
        nn.init.orthogonal_(self.up.weight)  # attached, so cut already: touching it brings it whole
        with torch.no_grad():
            self.down.weight.mul_(0.1)
            self.down.bias[1] = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.gain


class Built(nn.Module):
    """Everything that constructors do: own parameters, ties, inserts, init by apply, copies between parameters."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.position = nn.Parameter(torch.randn(5, width))
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.blocks.insert(1, Block(width))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._draw)
        with torch.no_grad():
            self.blocks[0].up.weight.copy_(self.blocks[1].up.weight * 2)

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.2)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.uniform_(-1, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = x + block(x)
        return (self.head(x) * self.scale).square().mean()


def build(seed: int = 3) -> Built:
    torch.manual_seed(seed)
    return Built()


def built_in_slices(seed_differs: bool) -> dict[str, Any]:
    channels = groups()
    torch.manual_seed(3 + (channels.gather.rank if seed_differs else 0))
    with Init(channels.gather, channels.control):
        model = Built()
    several = channels.gather.world_size > 1
    released = all(bool(p.isnan().all()) for p in model.parameters() if p.numel() > 1)
    held = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())
    drawn_next = torch.rand(3)
    with gathered_anywhere(model.parameters()):
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {
        "released": released == several,
        "small": held < 200 or not several,
        "values": values,
        "generator": drawn_next,
        "tied": model.head.weight is model.embedding.weight,
        "absent again": all(bool(p.isnan().all()) for p in model.parameters() if p.numel() > 1) == several,
        "shapes": {name: tuple(p.shape) for name, p in model.named_parameters()},
    }


@pytest.mark.parametrize("seed_differs", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_are_those_that_one_process_with_rank_0s_seed_draws(world_size: int, seed_differs: bool) -> None:
    reference = build()
    drawn_next = torch.rand(3)
    for facts in run_ranks(built_in_slices, world_size, seed_differs):
        assert facts["released"] and facts["small"] and facts["tied"] and facts["absent again"]
        assert facts["shapes"] == {name: tuple(p.shape) for name, p in reference.named_parameters()}
        for name, p in reference.named_parameters():
            assert torch.equal(facts["values"][name], p), name
        assert torch.equal(facts["generator"], drawn_next)


def trained(dtype_inside: bool) -> float:
    """A model built in slices, cut and trained, against a plain one; the distance of the weights."""
    channels = groups()
    torch.manual_seed(3)
    with Init(channels.gather, channels.control):
        model = Built()
        if dtype_inside:
            model.double()
    reference = build().double()
    parts = cut(model, 3)
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), parts)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        batch = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(step))
        model(batch).backward()
        optimizer.step()
        reference(batch).backward()
        expected.step()
        reference.zero_grad()
    if gathered_bytes(parts):
        raise AssertionError("units are present outside a pass")
    wholes = [full_parameter(parts, p) for p in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(wholes, reference.parameters(), strict=True))


@pytest.mark.parametrize("dtype_inside", [False, True])
def test_a_model_built_in_slices_trains_like_a_plain_one(dtype_inside: bool) -> None:
    assert max(run_ranks(trained, 2, dtype_inside)) < 1e-12


def after_a_failure() -> tuple[str, bool]:
    channels = groups()
    text = ""
    try:
        with Init(channels.gather, channels.control):
            nn.Sequential(nn.Linear(3, 3))
            raise ValueError("the user's own")
    except ValueError as error:
        text = str(error)
    plain = nn.Sequential(nn.Linear(3, 3))
    return text, bool(plain[0].weight.isfinite().all())


def test_after_an_error_inside_models_are_built_whole_again() -> None:
    assert run_ranks(after_a_failure, 2) == [("the user's own", True)] * 2


def changed() -> list[float]:
    channels = groups()
    with Init(channels.gather, channels.control):
        model = nn.Sequential(nn.Linear(4, 4))
    with gathered_anywhere(model[0].weight, modifier_rank=1), torch.no_grad():
        model[0].weight.fill_(5.0 + channels.gather.rank)
    with gathered_anywhere([model[0].weight, None, "not a parameter"]):
        return sorted(set(model[0].weight.flatten().tolist()))


def test_values_can_be_changed_before_any_engine_owns_them() -> None:
    assert run_ranks(changed, 2) == [[6.0], [6.0]]


class Reset(nn.Module):
    """What leaves the meta device has no values until `reset_parameters` draws them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.gain = nn.Parameter(torch.empty(()))
        self.table = nn.Parameter(torch.empty(7, 8))
        self.codes = nn.Parameter(torch.empty(4, dtype=torch.int8), requires_grad=False)
        self.register_buffer("shift", torch.empty(8))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table)
        with torch.no_grad():
            self.gain.fill_(0.5)
            self.shift.fill_(1.0)
            self.codes.fill_(3)
            self.layers[0].bias.copy_(self.layers[1].bias + self.table[0])


def materialise(model: nn.Module, held: list[int] | None = None) -> None:
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in reversed(list(model.modules())):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
            if held is not None:
                with torch._C.DisableTorchFunction():  # Init takes a look at the memory for a use of it
                    held.append(sum({p.data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values()))


def from_meta() -> dict[str, Any]:
    with torch.device("meta"):
        model = Reset()
    parts = groups()
    held: list[int] = []
    with Init(parts.gather, parts.control, max_full_numel=80):
        materialise(model, held)
    after = sum(p.untyped_storage().nbytes() for p in model.parameters())
    partition = cut(model, 3)
    weights = {
        name: full_parameter(partition, p) if partition.find(p) else p.detach().clone()
        for name, p in model.named_parameters()
    }
    return {"weights": weights, "held": held, "after": after, "shift": model.shift.clone()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_model_from_the_meta_device_is_given_memory_parameter_by_parameter(ranks: int) -> None:
    with torch.device("meta"):
        alone = Reset()
    materialise(alone)
    total = sum(p.nbytes for p in alone.parameters())
    for found in run_ranks(from_meta, ranks):
        for name, p in alone.named_parameters():
            assert torch.equal(found["weights"][name], p), name
        assert torch.equal(found["shift"], alone.shift)
        if ranks > 1:
            assert max(found["held"]) < total / 2 and found["after"] < total / 10


class DrawsItself(nn.Module):
    """Initialised by Python's generator, by rank 0 alone, or by torch, whose generators agree."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.rows = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.inner = Drawn(how)
        self.own = nn.Parameter(torch.ones(4, 5))
        if how == "python, after":
            for row in self.rows:
                nn.init.constant_(row.weight, random.random())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(self.rows[1](self.rows[0](x))) * self.own.sum(0)).square().mean()


class Drawn(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 5))
        if how == "python":
            with torch.no_grad():
                self.weight.fill_(random.random())
        if how == "rank 0 alone" and (not dist.is_initialized() or dist.get_rank() == 0):
            nn.init.normal_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def drawn_differently(how: str) -> dict[str, Any]:
    channels = groups()
    random.seed(7 + channels.gather.rank)
    torch.manual_seed(3)
    said = Said()
    logging.getLogger("zero_partition").addHandler(said)
    with Init(channels.gather, channels.control):
        model = DrawsItself(how)
    logging.getLogger("zero_partition").removeHandler(said)
    parts = cut(model, 3)
    return {"weights": {n: full_parameter(parts, p) for n, p in model.named_parameters()}, "said": said.lines}


@pytest.mark.parametrize("how", ["torch", "python", "python, after", "rank 0 alone"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_where_ranks_draw_differently_all_have_rank_0s_values_and_it_is_said_once(world_size: int, how: str) -> None:
    random.seed(7)
    torch.manual_seed(3)
    reference = DrawsItself(how).double()
    answers = run_ranks(drawn_differently, world_size, how)
    for facts in answers:
        for name, p in reference.named_parameters():
            assert torch.equal(facts["weights"][name], p), name
    differs = world_size > 1 and how != "torch"
    assert [len(facts["said"]) for facts in answers] == [int(differs)] + [0] * (world_size - 1)
    first = {"python": "'inner.weight of DrawsItself'", "rank 0 alone": "'inner.weight of DrawsItself'"}.get(how, "row")
    assert not differs or first in answers[0]["said"][0]


class Gathers(nn.Module):
    """Initialises what is sharded already as scripts for DeepSpeed do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.rows = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        with gathered_anywhere([self.table.weight, *self.rows.parameters()], modifier_rank=0), torch.no_grad():
            if not dist.is_initialized() or dist.get_rank() == 0:
                self.table.weight.normal_()
                self.rows[0].weight.copy_(self.rows[1].weight * 3)
                self.rows[0].bias.data = torch.ones(4)
        with gathered_anywhere(self.rows[1].weight):
            self.seen = self.rows[1].weight.detach().clone()


def gathers_inside() -> tuple[dict[str, torch.Tensor], torch.Tensor, list[bool]]:
    channels = groups()
    torch.manual_seed(3)
    with Init(channels.gather, channels.control, max_full_numel=8):
        model = Gathers()
    absent = [bool(p.isnan().all()) for p in model.parameters()]
    parts = cut(model, 3)
    return {n: full_parameter(parts, p) for n, p in model.named_parameters()}, model.seen, absent


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_can_be_gathered_inside_init(world_size: int) -> None:
    torch.manual_seed(3)
    reference = Gathers().double()
    for weights, seen, absent in run_ranks(gathers_inside, world_size):
        for name, p in reference.named_parameters():
            assert torch.equal(weights[name], p), name
        assert torch.equal(seen.double(), reference.seen.double())
        assert all(absent) == (world_size > 1)


def on_meta(rank: int) -> str:
    channels = groups()
    with torch.device("meta" if channels.gather.rank == rank else "cpu"):
        model = Reset()
    try:
        cut(model, 3)
    except PartitionError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_model_on_the_meta_device_is_refused_with_its_first_parameter_and_the_way_out(
    world_size: int, rank: int
) -> None:
    for text in run_ranks(on_meta, world_size, rank):
        assert "'gain'" in text and f"rank {rank}" in text and "`with Init(config=...)" in text and "to_empty" in text
