"""States of an optimizer that a script sets count as with plain torch, or are refused by the parameter's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import script_states
import torch
import torch.distributed as dist
import user_scripts
from script_bench import mlp
from test_user_scripts import complaint, outcomes
from user_scripts import Where

import zero_core
from zero_comm import run_ranks

SOAK = pytest.mark.soak
ANYWHERE = (
    "counts_the_states",
    "sets_adams_states_before_the_first_step",
    "sets_momentum_before_the_first_step",
    "sets_whole_states_before_the_first_step",
)
BY_ONE_RANK = ("copies_a_moment", "sets_moments_of_full_shape")
IN_MEMORY = ("deletes_the_momentum", "pops_the_momentum")


def may_run(name: str, world: int, where: Where) -> bool:
    """Return whether the script has to do what it does with plain torch; else it has to be refused."""
    in_one_piece, on_device = world == 1 or where.stage == 0, where.tier == "device"
    return (
        name in ANYWHERE
        or (name in BY_ONE_RANK and in_one_piece)
        or (name in IN_MEMORY and on_device)
        or (in_one_piece and on_device)
    )


def all_outcomes(where: Where) -> dict[str, user_scripts.Outcome]:
    return {
        name: user_scripts.run_sharded(name, replace(where, folder=str(Path(where.folder, str(number)))))
        for number, name in enumerate(script_states.script)
    }


@pytest.mark.parametrize(
    ("world", "where"),
    [
        (1, Where(1, "cpu")),
        (2, Where(1)),
        (3, Where(3)),
        (2, Where(3, "cpu")),
        pytest.param(1, Where(3), marks=SOAK),
        pytest.param(1, Where(3, "nvme"), marks=SOAK),
        pytest.param(2, Where(0), marks=SOAK),
        pytest.param(3, Where(2, "nvme"), marks=SOAK),
        pytest.param(2, Where(3, unit_min=1000), marks=SOAK),
    ],
    ids=str,
)
def test_states_that_a_script_sets_count_or_are_refused_by_name(world: int, where: Where, tmp_path: Path) -> None:
    ended = run_ranks(all_outcomes, world, replace(where, folder=str(tmp_path)), timeout=240)
    for name in script_states.script:
        here = [rank[name] for rank in ended]
        assert not complaint(here, user_scripts.run_plain(name)), (name, here[0].refused)
        refusals = {outcome.refused for outcome in here}
        assert (refusals == {""}) == may_run(name, world, where), (name, refusals)
        assert refusals == {""} or all("parameter '" in one for one in refusals), refusals


@pytest.mark.parametrize("name", ["copies_a_moment", "shares_a_moment"])
def test_the_ranks_that_hold_no_states_learn_why_one_refused_to_set_them(name: str) -> None:
    ended = outcomes(name, 2, Where(1, "cpu", unit_min=100_000))
    assert all("parameter '" in outcome.refused for outcome in ended), ended
    assert not complaint(ended, user_scripts.run_plain(name))


def start(stage: int, tier: str) -> zero_core.Engine:
    model = mlp()
    zero = {"stage": stage, "offload_optimizer": {"device": tier}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return zero_core.initialize(model=model.float(), optimizer=optimizer, config=config)[0]


def loaded_before_a_step(folder: str, of: str, to: str, stage: int) -> dict[str, torch.Tensor]:
    """Weights after two steps of an engine that has loaded what another saved before its first step."""
    first = start(stage, of)
    first.save_checkpoint(folder)
    first.destroy()
    engine = start(stage, to)
    engine.load_checkpoint(folder)
    for step in range(2):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).bfloat16()
        engine.backward(engine(x).float().square().mean())
        engine.step()
    found = {name: engine.full_param(p).clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_from_before_the_first_step_loads_on_another_tier(stage: int, tmp_path: Path) -> None:
    places = [("cpu", "none"), ("none", "cpu"), ("none", "none")]
    found = [run_ranks(loaded_before_a_step, 2, str(tmp_path / "-".join(one)), *one, stage)[0] for one in places]
    for other in found[:2]:
        for name, weight in found[2].items():
            assert torch.allclose(other[name], weight, rtol=0, atol=1e-2), name
