"""Mixtures of experts at stage 3: packed experts without leaf lists, adapters on them, experts as modules."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import _experts_training as experts
import training
import zoo

import zero_core
from zero_comm import run_ranks

STEPS = 3
BOUND = 5e-5
"""Of weights after `STEPS` of Adam: routers compute in float32, and so do the models here."""


@functools.cache
def one_process(kind: str, adapters: bool, ranks: int) -> dict[str, torch.Tensor]:
    model = experts.build(kind)
    return experts.plain(experts.with_adapters(model) if adapters else model, STEPS, ranks)


def on_ranks(kind: str, adapters: bool, recomputes: bool, stage: int) -> dict[str, Any]:
    model = experts.build(kind)
    model = experts.with_adapters(model) if adapters else model
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    routing = experts.Routing(model)
    engine = zero_core.initialize(model=model, config=experts.settings(stage))[0]
    return {"weights": experts.trained(engine, STEPS), "routing": routing.counts}


@pytest.mark.parametrize("recomputes", (False, True))
@pytest.mark.parametrize("adapters", (False, True))
@pytest.mark.parametrize(
    ("kind", "stage", "ranks"),
    [
        ("Mixtral", 3, 2),
        ("Qwen3Moe", 3, 3),
        *(
            pytest.param(kind, stage, ranks, marks=pytest.mark.soak)
            for kind in experts.KINDS
            for stage, ranks in ((0, 2), (2, 3), (3, 1), (3, 2), (3, 3))
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_packed_experts_train_without_leaf_lists_as_one_process(
    kind: str, stage: int, ranks: int, adapters: bool, recomputes: bool
) -> None:
    if adapters:
        pytest.importorskip("peft")
    results = run_ranks(on_ranks, ranks, kind, adapters, recomputes, stage)
    expected = one_process(kind, adapters, ranks)
    for told in results:
        assert training.deviation(told["weights"], expected) <= BOUND
    times = 2 if recomputes else 1
    for counts in results[0]["routing"].values():
        assert sum(counts) == times * STEPS * experts.SEQUENCES * experts.LENGTH * 2
    statistics = [told["routing"] for told in results]
    print(f"{kind}: tokens by layer and expert, by rank: {statistics}")
    assert ranks == 1 or statistics[0] != statistics[1]


def gathered_bytes(engine: zero_core.Engine) -> dict[str, int]:
    """Bytes that this rank has sent in gathers, by unit."""
    return {name: row.sent_bytes for phase, name, row in engine.ledger if phase == "gather"}


def adapters_only(kind: str) -> dict[str, Any]:
    """Read the adapters' weights of a model whose base is frozen, in each way that needs them."""
    model = experts.with_adapters(experts.build(kind))
    engine = zero_core.initialize(model=model, config=experts.settings(3))[0]
    experts.trained(engine, 1)
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    held = engine.partition.units
    frozen = {u.name for u in held if not any(p.requires_grad for p in u.parameters)}
    mixed = [u.name for u in held if len({p.requires_grad for p in u.parameters}) > 1]
    before = gathered_bytes(engine)
    peak = 0
    with engine.gathered(trained):
        peak = engine.partition.memory()["gathered parameters"]
        saved = {name: p.detach().clone() for name, p in engine.module.named_parameters() if p.requires_grad}
    full = {id(p): engine.full_param(p) for p in trained}
    after = gathered_bytes(engine)
    same = all(torch.equal(full[id(p)], saved[n]) for n, p in engine.module.named_parameters() if p.requires_grad)
    numel = sum(p.numel() for p in engine.module.parameters() if not p.requires_grad)
    return {
        "frozen": len(frozen),
        "mixed": mixed,
        "base": [name for name in frozen if after.get(name, 0) != before.get(name, 0)],
        "adapters": after != before,
        "peak": peak / (4 * numel),
        "same": same,
    }


@pytest.mark.parametrize("kind", ("Mixtral", "Qwen3Moe"))
def test_adapters_of_experts_are_read_without_gathering_the_frozen_base(kind: str) -> None:
    pytest.importorskip("peft")
    for told in run_ranks(adapters_only, 2, kind):
        assert told["frozen"] and not told["mixed"] and not told["base"], told
        assert told["adapters"] and told["same"] and told["peak"] < 0.5, told


def chosen(step: int, rank: int, of: int) -> list[int]:
    return random.Random(100 * step + rank).sample(range(of), 2)


def separate(of: int, differ: bool) -> dict[str, Any]:
    """Experts that are modules, of which passes use some; returns, by step, experts that were gathered and used."""
    torch.manual_seed(0)
    run = training.Run(steps=6)
    engine = training.start(run, 3, zoo.Experts().double(), unit_min_numel=1, unit_max_numel=1)
    rows = []
    for step in range(6):
        before = gathered_bytes(engine)
        mine = chosen(step, dist.get_rank() if differ else 0, of)
        x = torch.randn(2, zoo.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x, mine))
        engine.step()
        after = gathered_bytes(engine)
        names = [name for name in after if after[name] != before.get(name, 0) and "experts." in name]
        rows.append((sorted({int(name.split("experts.")[1][0]) for name in names}), mine))
    return {"rows": rows, "weights": training.weights(engine)}


@pytest.mark.parametrize("differ", (False, True))
def test_experts_that_are_modules_are_gathered_only_if_a_rank_has_used_them(differ: bool) -> None:
    """After the first pass, which gathers all. Later ones gather what a rank uses, or has used in an earlier pass."""
    results = run_ranks(separate, 2, 3, differ)
    used: set[int] = set()
    for step, rows in enumerate(zip(*(told["rows"] for told in results), strict=True)):
        used |= {number for _, mine in rows for number in mine}
        assert rows[0][0] == rows[1][0]
        if step:
            assert set(rows[0][0]) <= used and 3 not in rows[0][0], (step, rows)
