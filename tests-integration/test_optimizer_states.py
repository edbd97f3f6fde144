"""State dicts of the returned optimizer: plain torch's are loaded, its own come back, others are refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import user_scripts
import zoo
from training import DTYPES, LR, Run, deviation
from user_scripts import Where

import zero_core
from zero_comm import run_ranks
from zero_partition import PartitionError

STAGES = (0, 1, 2, 3)
SOAK = pytest.mark.soak
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9),
}


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups; the first has a frozen parameter in it."""
    model.blocks[1].up.weight.requires_grad_(False)
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": LR / 2}]


def plain(optimizer: str, steps: int, model: Any = None, state: Any = None) -> tuple[Any, Any]:
    """Train in one process; return the model and the optimizer's state dict."""
    model = model if model is not None else zoo.build("plain")
    chosen = OPTIMIZERS[optimizer](groups_of(model))
    if state is not None:
        chosen.load_state_dict(copy.deepcopy(state))  # torch trains on what it is given
    for step in range(steps):
        sum(model(*zoo.batch(step, 0))).backward()
        chosen.step()
        chosen.zero_grad()
    return model, copy.deepcopy(chosen.state_dict())


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def start(optimizer: str, stage: int, zero: dict[str, Any], model: Any = None, dtype: str = "fp64") -> Any:
    model = model if model is not None else zoo.build("plain", DTYPES["fp32" if dtype == "bf16" else dtype])
    settings = training.config(Run(dtype=dtype), stage, dist.get_world_size(), **zero)
    return zero_core.initialize(model=model, optimizer=OPTIMIZERS[optimizer](groups_of(model)), config=settings)[0]


def train(engine: Any, first: int, last: int) -> None:
    training.train(engine, Run(), first, last)


def loads_plain(cases: list[tuple[str, int, dict[str, Any]]], states: dict[str, Any]) -> list[Any]:
    """The weights after a plain optimizer's state was loaded and two steps taken; its learning rates come too."""
    found = []
    for optimizer, stage, zero in cases:
        engine = start(optimizer, stage, zero)
        train(engine, 5, 6)
        with engine.gathered(engine.module.parameters(), modifier_rank=0):
            engine.module.load_state_dict(zoo.build("plain").state_dict())
        engine.optimizer.load_state_dict(copy.deepcopy(states[optimizer]))  # torch trains on what it is given
        train(engine, 0, 2)
        found.append((training.weights(engine), engine.get_lr()))
        engine.destroy(unshard=False)
    return found


def tiers(folder: Path) -> list[dict[str, Any]]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return [{}, {"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": nvme}]


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_a_plain_optimizers_state_is_loaded(world_size: int, tmp_path: Path) -> None:
    states = {}
    for name in OPTIMIZERS:
        states[name] = plain(name, 3)[1]
        states[name]["param_groups"][1]["lr"] = LR / 4
    stages = {1: (3,), 2: (0, 1, 3), 3: (2,)}[world_size]
    cases = [("adamw", stage, zero) for stage in stages for zero in tiers(tmp_path)[: 3 if stage == 2 else 1]]
    cases += [("sgd", stages[-1], zero) for zero in tiers(tmp_path)[: 2 if stages[-1] else 1]]
    expected = {name: weights_of(plain(name, 2, state=states[name])[0]) for name in OPTIMIZERS}
    for found in run_ranks(loads_plain, world_size, cases, states):
        for (name, stage, zero), (weights, rates) in zip(cases, found, strict=True):
            assert deviation(weights, expected[name]) <= 1e-12, (name, stage, zero)
            assert rates == [LR, LR / 4]


def goes_back(cases: list[tuple[int, dict[str, Any], str]]) -> list[bool]:
    """Return whether steps repeat to the bit after weights and states were put back, as a learning-rate finder does."""
    found = []
    for stage, zero, dtype in cases:
        engine = start("adamw", stage, zero, dtype=dtype)
        for before in (0, 2):
            train(engine, 0, before)
            states = copy.deepcopy(engine.optimizer.state_dict())
            masters = training.weights(engine)
            train(engine, 2, 4)
            once = training.weights(engine)
            for name, p in engine.module.named_parameters():
                engine.set_full_param(p, masters[name])
            engine.optimizer.load_state_dict(states)
            train(engine, 2, 4)
            found.append(training.bits(once) == training.bits(training.weights(engine)))
        engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize(
    ("world_size", "stages", "on_tiers"),
    [
        (1, (0, 2), slice(1, 2)),
        (2, (1, 3), slice(2, 3)),
        *(pytest.param(n, STAGES, slice(3), marks=SOAK) for n in (1, 2)),
    ],
)
def test_the_optimizers_own_state_dict_comes_back_to_the_bit(
    world_size: int, stages: tuple[int, ...], on_tiers: slice, tmp_path: Path
) -> None:
    cases: list[tuple[int, dict[str, Any], str]] = [(stage, {}, "fp64") for stage in stages]
    cases += [(2, zero, "bf16") for zero in tiers(tmp_path)[on_tiers]]
    for found in run_ranks(goes_back, world_size, cases):
        assert all(found), list(zip(cases, found, strict=False))


EDITS = (
    "clears_all_states",
    "edits_moments_by_views_and_lists",
    "edits_the_tensors_of_a_state_dict",
    "goes_back_to_a_copy_of_the_states",
    "halves_all_moments",
    "sets_a_dict_of_copied_states",
    "sets_a_new_dict_of_states",
    "writes_what_it_has_assigned",
)


def edited(places: list[Where], names: tuple[str, ...]) -> list[user_scripts.Outcome]:
    return [user_scripts.run_sharded(name, where) for where in places for name in names]


@pytest.mark.parametrize(
    ("world_size", "places", "names"),
    [
        (2, [(1, "nvme"), (3, "cpu")], (*EDITS[1:3], EDITS[-1])),
        (3, [(2, "cpu")], EDITS),
        (1, [(3, "nvme")], EDITS[1:4]),
        *(pytest.param(n, [(s, t)], EDITS, marks=SOAK) for n in (1, 2, 3) for s in (1, 2, 3) for t in ("cpu", "nvme")),
    ],
)
def test_states_on_a_tier_are_read_and_edited_as_in_plain_torch(
    world_size: int, places: list[tuple[int, str]], names: tuple[str, ...], tmp_path: Path
) -> None:
    wanted = [user_scripts.run_plain(name) for name in names] * len(places)
    wheres = [Where(stage, tier, folder=str(tmp_path)) for stage, tier in places]
    for found in run_ranks(edited, world_size, wheres, names):
        for outcome, values in zip(found, wanted, strict=True):
            assert not outcome.refused and deviation(outcome.values, values) <= 1e-12, outcome.refused


def reads_alone(stage: int, state_dtype: str | None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """The weights with and without reads of the optimizer's states on rank 0 alone, and what a read said."""
    found, said = [], ""
    for reads in (False, True):
        settings = training.config(Run(dtype="bf16"), stage, dist.get_world_size(), offload_optimizer={"device": "cpu"})
        settings["offload"] = {"delayed_update": True, **({"state_dtype": state_dtype} if state_dtype else {})}
        model = zoo.build("plain", torch.float32)
        engine = zero_core.initialize(model=model, optimizer=OPTIMIZERS["adamw"](groups_of(model)), config=settings)[0]
        for step in range(4):
            train(engine, step, step + 1)
            if reads and dist.get_rank() == 0:
                engine.optimizer.state_dict()
                try:
                    said = str([state["exp_avg"].sum() for state in engine.optimizer.state.values()])
                except PartitionError as error:
                    said = str(error)
        found.append(training.weights(engine))
        engine.destroy(unshard=False)
    return found[0], found[1], said


@pytest.mark.parametrize(("stage", "state_dtype"), [(1, None), pytest.param(2, None, marks=SOAK), (3, "int8")])
def test_one_rank_alone_may_read_states_beside_a_delayed_update(stage: int, state_dtype: str | None) -> None:
    ranks = run_ranks(reads_alone, 2, stage, state_dtype)
    for without, with_reads, _ in ranks:
        assert training.bits(without) == training.bits(with_reads)
    assert ("8-bit" in ranks[0][2]) is (state_dtype == "int8")


def refusals(stage: int, state: Any) -> list[str]:
    found = []
    for wrong in ("fewer parameters", "another shape", "another model's", "groups"):
        engine = start("adamw", stage, {})
        given = copy.deepcopy(state)
        if wrong == "fewer parameters":
            given["param_groups"][0]["params"] = given["param_groups"][0]["params"][:-1]
        elif wrong == "another shape":
            given["state"][0]["exp_avg"] = given["state"][0]["exp_avg"][:-1]
        elif wrong == "groups":
            given["param_groups"] = given["param_groups"][:1]
        else:
            given["state"] = {k: {**v, "exp_avg": v["exp_avg"].flatten()[:2]} for k, v in given["state"].items()}
        try:
            engine.optimizer.load_state_dict(given)
            found.append("loaded")
        except PartitionError as error:
            found.append(str(error))
        engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("stage", (1, pytest.param(2, marks=SOAK), 3))
def test_a_state_that_does_not_fit_is_refused_by_name(stage: int) -> None:
    state = plain("adamw", 1)[1]
    for found in run_ranks(refusals, 2, stage, state):
        assert "[11, 10] parameters" in found[0] and "[10, 10]" in found[0]
        assert all("'exp_avg' of parameter 'embedding.weight': expected shape (13, 8)" in text for text in found[1:3])
        assert "[11, 10] parameters" in found[3] and "got [11]" in found[3]


def swaps(stage: int) -> Any:
    """Load the state dict of the neighbour; at stage 0 train on with it."""
    engine = start("adamw", stage, {})
    train(engine, 0, 2)
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, engine.optimizer.state_dict())
    try:
        engine.optimizer.load_state_dict(given[(dist.get_rank() + 1) % len(given)])
        train(engine, 2, 4)
        return training.bits(training.weights(engine))
    except PartitionError as error:
        return str(error)
    finally:
        engine.destroy(unshard=False)


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_dict_of_another_rank_is_refused_by_name_unless_it_has_full_states(stage: int) -> None:
    expected = run_ranks(goes_on, 2, stage)
    for rank, found in enumerate(run_ranks(swaps, 2, stage)):
        if stage == 0:
            assert found == expected[rank]
        else:
            assert "other fragments than this rank's" in found and "'embedding.weight'" in found, found


def goes_on(stage: int) -> Any:
    engine = start("adamw", stage, {})
    train(engine, 0, 4)
    found = training.bits(training.weights(engine))
    engine.destroy(unshard=False)
    return found
