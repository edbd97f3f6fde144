"""What user code does to weights between steps and inside forward, written once for plain torch and for the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import vector_to_parameters

import zero_core
from zero_partition import PartitionError, gathered

WIDTH, ROWS, STEPS, LR = 6, 6, 4, 0.05


class Net(nn.Module):
    """Two layers, a frozen one and a codebook; ``forward_edit`` is called with the module inside forward."""

    def __init__(self, edit: Callable[[Net], None] | None = None, max_norm: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(5, WIDTH, max_norm=max_norm)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.codes = nn.Parameter(torch.randn(4, WIDTH), requires_grad=False)
        self.edit = edit

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.edit is not None:
            self.edit(self)
        h = self.frozen(torch.tanh(self.first(x))) + self.embedding(tokens).mean(0) + self.codes.mean(0)
        h = h + self.router(h.to(self.router.weight.dtype)).to(h.dtype)
        return self.second(h).float().square().mean() if x.dtype.itemsize < 4 else self.second(h).square().mean()


def rows(step: int, dtype: torch.dtype, *, own: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of a batch (``own``), or all of them; the tokens are the same everywhere."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)
    if own and dtype is torch.float64:
        x = x.chunk(dist.get_world_size())[dist.get_rank()]
    return x, torch.tensor([0, 1, 1, 4])


class Plain:
    """One process with torch.optim; in bfloat16 over masters in float32, which follow weights that they do not round
    to."""

    sharded = False

    def __init__(self, model: Net, dtype: torch.dtype) -> None:
        self.model, self.dtype = model.to(dtype), dtype
        trained = [p for p in model.parameters() if p.requires_grad]
        self.masters = [(p, nn.Parameter(p.detach().float()) if dtype.itemsize < 4 else p) for p in trained]
        self.optimizer = torch.optim.AdamW([m for _, m in self.masters], lr=LR)

    def step(self, number: int) -> None:
        self.model(*rows(number, self.dtype, own=False)).backward()
        with torch.no_grad():
            for p, m in self.masters:
                if m is not p and p.grad is not None:
                    m.copy_(torch.where(m.to(self.dtype) == p.to(self.dtype), m, p.float()))
                    m.grad, p.grad = p.grad.float(), None
            self.optimizer.step()
            for p, m in self.masters:
                if m is not p:
                    p.data = p.data.to(self.dtype)
                    p.copy_(m)
        self.optimizer.zero_grad()

    @contextmanager
    def gathered(self, _parameters: Any, modifier_rank: int | None = None) -> Iterator[None]:
        yield

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().double().clone() for n, p in self.model.named_parameters()}


class Sharded:
    """The same through the engine."""

    sharded = True

    def __init__(
        self,
        model: Net,
        dtype: torch.dtype,
        stage: int,
        tier: str,
        folder: str,
        *,
        persistent: bool = False,
        **sections: Any,
    ) -> None:
        self.model, self.dtype, self.stage = model, dtype, stage
        settings = config(dtype, stage, tier, folder) | sections
        if persistent:
            settings["zero_optimization"]["stage3_param_persistence_threshold"] = 10**6
        self.engine = zero_core.initialize(model=model.to(dtype), config=settings)[0]
        self.gathered = self.engine.gathered

    def step(self, number: int) -> None:
        self.engine.backward(self.engine(*rows(number, self.dtype, own=True)))
        self.engine.step()

    def weights(self) -> dict[str, torch.Tensor]:
        with gathered(self.engine.partition, self.model.parameters(), read_only=True):
            return {n: p.detach().double().clone() for n, p in self.model.named_parameters()}


Trainer = Plain | Sharded
Edit = Callable[[Trainer, int], None]


def config(dtype: torch.dtype, stage: int, tier: str, folder: str) -> dict[str, Any]:
    """Small units, nothing persistent; states (and at stage 3 shards) on ``tier``."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1}
    if tier != "none" and stage:
        section = {"device": tier} if tier == "cpu" else {"device": tier, "nvme_path": folder}
        zero |= {"offload_optimizer": section} | ({"offload_param": section} if stage == 3 else {})
    precision = {"bf16": {"enabled": True}} if dtype.itemsize < 4 else {"data_types": {"param_dtype": "fp64"}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": zero,
        **precision,
    }


def given(shape: torch.Size, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# -- between steps: called with the trainer after every step ---------------------------------------------------------


def replaces_data(t: Trainer, step: int) -> None:
    if step in (0, 2):
        t.model.first.weight.data = given(t.model.first.weight.shape, t.dtype, step)
        t.model.frozen.bias.data = given(t.model.frozen.bias.shape, t.dtype, step)


def writes_a_vector(t: Trainer, step: int) -> None:
    if step == 1:
        total = sum(p.numel() for p in t.model.parameters())
        vector_to_parameters(given(torch.Size([total]), t.dtype), t.model.parameters())


def replaces_data_in_gathered(t: Trainer, step: int) -> None:
    with t.gathered([t.model.first.weight, t.model.codes]):
        t.model.first.weight.data = t.model.first.weight.data * 0.5
        t.model.codes.data = t.model.codes.data * 0.5


def replaces_data_in_gathered_by_rank_0(t: Trainer, step: int) -> None:
    with t.gathered([t.model.first.weight], modifier_rank=0):
        t.model.first.weight.data = t.model.first.weight.data * 0.5


def swap(one: nn.Parameter, other: nn.Parameter) -> None:
    one.data, other.data = other.data, one.data


def swaps_data_in_gathered(t: Trainer, step: int) -> None:
    with t.gathered([t.model.first.weight, t.model.second.weight, t.model.frozen.weight]):
        swap(t.model.first.weight, t.model.second.weight)
        t.model.frozen.weight.data = t.model.frozen.weight.data.t()


def swaps_data_in_gathered_by_rank_0(t: Trainer, step: int) -> None:
    with t.gathered([t.model.first.weight, t.model.second.weight, t.model.frozen.weight], modifier_rank=0):
        swap(t.model.first.weight, t.model.second.weight)
        t.model.frozen.weight.data = t.model.frozen.weight.data.t()


def swaps_data(t: Trainer, step: int) -> None:
    swap(t.model.first.weight, t.model.second.weight)
    t.model.frozen.weight.data = t.model.frozen.weight.data.t()


def clamps_data_in_gathered(t: Trainer, step: int) -> None:
    with t.gathered(list(t.model.parameters())):
        for p in t.model.parameters():
            p.data.clamp_(-0.2, 0.2)


def clamps_data(t: Trainer, step: int) -> None:
    """Stages 0 to 2: parameters are whole; references held since before the engine do the same."""
    for p in HELD[id(t)]:
        p.data.clamp_(-0.2, 0.2)


def clamps_under_no_grad(t: Trainer, step: int) -> None:
    if step == 2:
        with torch.no_grad():
            for p in t.model.parameters():
                p.clamp_(-0.2, 0.2)


def makes_a_round_trip(t: Trainer, step: int) -> None:
    t.model.float().to(t.dtype)


HELD: dict[int, list[nn.Parameter]] = {}
ANY_STAGE = [
    replaces_data,
    writes_a_vector,
    replaces_data_in_gathered,
    replaces_data_in_gathered_by_rank_0,
    swaps_data_in_gathered,
    swaps_data_in_gathered_by_rank_0,
    clamps_data_in_gathered,
]
BELOW_3 = [swaps_data, clamps_data, clamps_under_no_grad, makes_a_round_trip]


# -- inside forward --------------------------------------------------------------------------------------------------


def clamps(net: Net) -> None:
    with torch.no_grad():
        net.first.weight.clamp_(-0.2, 0.2)


def clamps_by_data(net: Net) -> None:
    net.first.weight.data.clamp_(-0.2, 0.2)
    net.codes.data.mul_(0.9)


def moves_its_codebook(net: Net) -> None:
    net.codes.data = net.codes.data * 0.9 + 0.01
    with torch.no_grad():
        net.codes.add_(0.01)


def casts_its_router(net: Net) -> None:
    net.router = net.router.to(torch.float32)


FORWARD = [clamps, clamps_by_data, moves_its_codebook]


def edits_all(net: Net) -> None:
    clamps_by_data(net)
    moves_its_codebook(net)
    with torch.no_grad():
        net.second.weight.clamp_(-0.3, 0.3)


# -- runs ------------------------------------------------------------------------------------------------------------


def run(t: Trainer, after: Edit | None, steps: int = STEPS) -> dict[str, torch.Tensor]:
    HELD[id(t)] = list(t.model.parameters())
    for step in range(steps):
        t.step(step)
        if after is not None:
            after(t, step)
    return t.weights()


def releases(stage: int, tier: str) -> bool:
    """Return whether parameters are released between passes."""
    return stage == 3 and (dist.get_world_size() > 1 or tier == "nvme")


def together(stage: int, tier: str) -> list[Edit]:
    """One edit after each step; released parameters refuse those that write where nothing is."""
    return [replaces_data, *ANY_STAGE[2:]] + ([] if releases(stage, tier) else BELOW_3)


def nets(dtype: torch.dtype, stage: int, tier: str) -> Iterator[tuple[str, Callable[[], Net], Any]]:
    """Name, model and what happens after each step."""
    for after in ANY_STAGE + ([] if releases(stage, tier) else BELOW_3):
        yield after.__name__, Net, after
    for edit in FORWARD:
        yield edit.__name__, lambda edit=edit: Net(edit), None
    yield "max_norm", lambda: Net(max_norm=0.7), None


def deviations(stage: int, tier: str, name: str, folder: str) -> dict[str, float]:
    """By case, the largest difference between the engine's weights and one process's."""
    dtype = getattr(torch, name)
    found = {}
    for case, make, after in nets(dtype, stage, tier):
        expected = run(Plain(make(), dtype), after)
        sharded = Sharded(make(), dtype, stage, tier, folder)
        ours = run(sharded, after)
        sharded.engine.destroy()
        found[case] = max(float((ours[n] - v).abs().nan_to_num(nan=1e9).max()) for n, v in expected.items())
    return found


def deviation_together(stage: int, tier: str, name: str, folder: str) -> float:
    """The largest difference between the engine's weights and one process's after all edits, one after each step."""
    dtype, edits = getattr(torch, name), together(stage, tier)

    def after(t: Trainer, step: int) -> None:
        edits[step](t, 2)

    def make() -> Net:
        return Net(edits_all, max_norm=0.7)

    expected = run(Plain(make(), dtype), after, len(edits))
    sharded = Sharded(make(), dtype, stage, tier, folder)
    ours = run(sharded, after, len(edits))
    sharded.engine.destroy()
    return max(float((ours[n] - v).abs().nan_to_num(nan=1e9).max()) for n, v in expected.items())


def refusals(stage: int, tier: str, folder: str) -> dict[str, str]:
    """By case, what the engine says to edits that ranks do not share or that do not fit; the weights stay."""
    found = {}
    for edit in (differs_by_rank, only_on_rank_0, another_shape, another_dtype, ties, in_gathered_on_rank_0):
        t = Sharded(Net(), torch.float64, stage, tier, folder)
        t.step(0)
        before = t.weights()
        try:
            edit(t)
            t.step(1)
            found[edit.__name__] = "nothing"
        except PartitionError as refusal:
            found[edit.__name__] = str(refusal)
        if stage < 3:  # the engine lives, with the weights that it had
            t.engine.zero_grad()
            after = t.weights()
            if any(not torch.equal(after[n], v) for n, v in before.items() if n != "second.weight"):
                found[edit.__name__] += " but weights changed"
    return found


def differs_by_rank(t: Trainer) -> None:
    t.model.first.weight.data = given(t.model.first.weight.shape, t.dtype, dist.get_rank())


def only_on_rank_0(t: Trainer) -> None:
    if dist.get_rank() == 0:
        t.model.first.weight.data = given(t.model.first.weight.shape, t.dtype)


def another_shape(t: Trainer) -> None:
    t.model.first.bias.data = torch.ones(1, dtype=t.dtype)


def another_dtype(t: Trainer) -> None:
    t.model.router.weight.data = t.model.router.weight.data.float()


def ties(t: Trainer) -> None:
    with t.gathered([t.model.first.weight, t.model.router.weight]):
        t.model.router.weight.data = t.model.first.weight.data.t()


def in_gathered_on_rank_0(t: Trainer) -> None:
    with t.gathered(t.model.second.weight):
        if dist.get_rank() == 0:
            t.model.second.weight.data.mul_(0.5)
