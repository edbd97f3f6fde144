"""Hooks of the user in `Engine.train_batch`: how often they run, and that what they change counts as in the loop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from train_batch_runs import MICRO_BATCHES, Case, Net, batches, config, facts

import zero_core
from zero_comm import run_ranks

FIRST, INSIDE, LAST, OUTSIDE = "blocks.0", "blocks.0.wide", "head", ""


def counted(model: nn.Module) -> Counter[tuple[str, str]]:
    """Count the hooks of each kind that run on the chosen modules, in a counter that grows."""
    ran: Counter[tuple[str, str]] = Counter()

    def count(name: str, kind: str) -> Any:
        return lambda *_: ran.update([(name, kind)])

    for name in (FIRST, INSIDE, LAST, OUTSIDE):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(count(name, "before forward"))
        module.register_forward_hook(count(name, "after forward"))
        module.register_full_backward_pre_hook(count(name, "before backward"))
        module.register_full_backward_hook(count(name, "after backward"))
    return ran


class Recomputed(Net):
    """Runs its blocks again in backward, as torch's checkpoints do."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        scale = hidden.square().mean().sigmoid()
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, scale, use_reentrant=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.roll(1, 1).flatten())


def runs_of_hooks(folder: str, how: str) -> Counter[tuple[str, str]]:
    """The hooks that run in one step: of ``train_batch``, of the ordinary loop, or of that with torch's checkpoints."""
    engine = zero_core.initialize(
        model=Recomputed() if how == "checkpoints" else Net(), config=config(Case("net", tier="nvme"), folder)
    )[0]
    ran = counted(engine.module)
    if how == "train_batch":
        engine.train_batch(batches(0))
    else:
        for ids in batches(0):
            engine.backward(engine(ids))
            engine.step()
    engine.destroy(unshard=False)
    return ran


def test_forward_hooks_of_a_unit_run_again_in_backward_as_with_torchs_checkpoints(tmp_path: Path) -> None:
    ways = ("train_batch", "checkpoints", "loop")
    by_unit, torchs, loop = (run_ranks(runs_of_hooks, 1, str(tmp_path), way)[0] for way in ways)
    assert set(loop.values()) == {MICRO_BATCHES}
    assert by_unit == torchs
    twice = {key for key, count in by_unit.items() if count == 2 * MICRO_BATCHES}
    assert twice == {(name, f"{when} forward") for name in (FIRST, INSIDE) for when in ("before", "after")}
    assert {count for key, count in by_unit.items() if key not in twice} == {MICRO_BATCHES}


def changed_by_hooks(case: Case, folder: str, unit_by_unit: bool) -> tuple[list[float], dict[str, bytes]]:
    """Losses and facts of steps in which hooks on modules and parameters change what passes them."""
    engine = zero_core.initialize(model=Net(), config=config(case, folder))[0]
    for name in (FIRST, INSIDE, LAST):
        module = engine.module.get_submodule(name)
        module.register_forward_pre_hook(lambda _module, given: (given[0] * 1.25, *given[1:]))
        module.register_forward_hook(lambda _module, _given, output: output + 0.125)
        module.register_full_backward_hook(lambda _module, into, _out: tuple(g if g is None else g * 1.5 for g in into))
        next(module.parameters()).register_hook(lambda gradient: gradient * 0.75)
    losses = []
    for step in range(3):
        if unit_by_unit:
            losses.append(float(engine.train_batch(batches(step))))
            continue
        total = torch.zeros(())
        for ids in batches(step):
            total = total + engine.backward(engine(ids))
            engine.step()
        losses.append(float(total))
    found = losses, facts(engine)
    engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize(("ranks", "tier"), [(1, "nvme"), (2, "none")])
def test_what_hooks_change_has_the_bits_of_the_ordinary_loop(ranks: int, tier: str, tmp_path: Path) -> None:
    case = Case("net", tier=tier)
    loop, by_unit = (run_ranks(changed_by_hooks, ranks, case, str(tmp_path), way) for way in (False, True))
    assert loop == by_unit
