"""Models whose parameters are replaced, added or reparametrized after `initialize` train as with plain torch.

A checkpoint holds their weights, or is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from script_bench import WIDTH, Workbench, mlp
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from zero_ckpt import open_checkpoint
from zero_comm import run_ranks


class Bounded(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(weight)


def adds(t: Any) -> None:
    torch.manual_seed(3)
    t.module.append(nn.Linear(WIDTH, WIDTH, dtype=torch.float64))


def replaces(t: Any) -> None:
    t.module[2].weight = nn.Parameter(t.module[2].weight.detach() * 0.5)


def resizes(t: Any) -> None:
    torch.manual_seed(4)
    larger = nn.Linear(12, WIDTH, bias=False, dtype=torch.float64)
    with torch.no_grad():
        larger.weight[:4] = t.module[4].weight[:4]
    t.module[4] = larger


def parametrizes(t: Any) -> None:
    parametrize.register_parametrization(t.module[2], "weight", Bounded())


def normalises_weights(t: Any) -> None:
    parametrizations.weight_norm(t.module[2])


def normalises_spectrally(t: Any) -> None:
    torch.manual_seed(5)
    parametrizations.spectral_norm(t.module[2])


def prunes(t: Any) -> None:
    prune.l1_unstructured(t.module[2], "weight", 0.3)


def removes_a_bias(t: Any) -> None:
    t.module[2].bias = None


SAVED, WEIGHT = "", "parameter '2.weight'"
CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "adds": (adds, SAVED),
    "normalises spectrally": (normalises_spectrally, f"{WEIGHT} is called '2.parametrizations.weight.original'"),
    "normalises weights": (normalises_weights, f"{WEIGHT} is computed from others"),
    "parametrizes": (parametrizes, f"{WEIGHT} is called '2.parametrizations.weight.original'"),
    "prunes": (prunes, f"{WEIGHT} is called '2.weight_orig'"),
    "removes a bias": (removes_a_bias, SAVED),
    "replaces": (replaces, f"{WEIGHT} of the model is another object"),
    "resizes": (resizes, "parameter '4.weight' of the model is another object"),
}


def trained(bench: Workbench, name: str) -> Any:
    """Two steps, the change, two more."""
    t = bench.trainer(mlp(), kind="adamw", lr=0.01)
    for step in range(4):
        if step == 2:
            with t.gathered(list(t.module.parameters())):
                CHANGES[name][0](t)
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(100 + step)))
        t.step()
    return t


def plain(name: str) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in trained(Workbench(plain=True), name).module.state_dict().items()}


def saves(name: str, stage: int, tier: str, folder: str) -> dict[str, Any]:
    bench = Workbench(plain=False, stage=stage, tier=tier, folder=f"{folder}/{name}")
    t = trained(bench, name)
    found: dict[str, Any] = {"weights": t.engine.consolidated_state_dict(), "refused": ""}
    try:
        t.engine.save_checkpoint(f"{folder}/{name}/saved", "x")
        found["held"] = sorted(e.name for e in open_checkpoint(f"{folder}/{name}/saved/x").manifest.tensors)
        for parameter in t.module.parameters():
            if t.engine.partition.find(parameter) is None:
                parameter.data.zero_()
        t.engine.load_checkpoint(f"{folder}/{name}/saved", "x")
        found["loaded"] = t.engine.consolidated_state_dict()
    except Exception as error:
        found["refused"] = str(error)
    bench.close()
    return found


def all_changes(names: list[str], places: list[tuple[int, str]], folder: str) -> list[dict[str, Any]]:
    return [saves(name, stage, tier, f"{folder}/{stage}{tier}") for stage, tier in places for name in names]


PLACES = [(0, "device"), *((stage, tier) for stage in (1, 2, 3) for tier in ("device", "cpu", "nvme"))]


@pytest.mark.parametrize(
    ("world_size", "places", "names"),
    [
        (2, [(3, "device")], [*CHANGES]),
        (3, [(1, "cpu")], ["adds", "parametrizes"]),
        *(pytest.param(n, PLACES, [*CHANGES], marks=pytest.mark.soak) for n in (1, 2, 3)),
    ],
)
def test_a_checkpoint_holds_the_models_weights_or_is_refused(
    world_size: int, places: list[tuple[int, str]], names: list[str], tmp_path: Any
) -> None:
    expected = [plain(name) for name in names] * len(places)
    for rank, found in enumerate(run_ranks(all_changes, world_size, names, places, str(tmp_path))):
        for name, facts, wanted in zip(names * len(places), found, expected, strict=True):
            refusal = CHANGES[name][1]
            assert refusal in facts["refused"] if refusal else not facts["refused"], (name, facts["refused"])
            if rank == 0:
                check(facts["weights"], wanted, name)
                if not refusal:
                    check(facts["loaded"], wanted, name)
                    assert set(wanted) <= set(facts["held"]), name


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], name: str) -> None:
    assert found.keys() == wanted.keys(), name
    for key, value in wanted.items():
        assert found[key].shape == value.shape and float((found[key] - value).abs().max()) <= 1e-12, (name, key)


def trained_head(bench: Workbench, *, averages: bool = True, seed: int = 3) -> tuple[Any, list[str]]:
    """Insert a last layer, drawn by ``seed``, and train it by a torch optimizer of its own for three steps.

    ``averages``: its gradients over the ranks. Return the trainer and what its steps refused.
    """
    t = bench.trainer(mlp(), kind="adamw", lr=0.01)
    torch.manual_seed(seed)
    t.module.insert(5, nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
    own = torch.optim.SGD(t.module[-1].parameters(), lr=0.1)
    refused: list[str] = []
    for step in range(3):
        t.backward(F.mse_loss(t(bench.rows(step)), bench.rows(100 + step)))
        try:
            t.step()
        except RuntimeError as error:
            refused.append(str(error))
            break
        for parameter in t.module[-1].parameters() if averages and not bench.plain else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= bench.world_size
        own.step()
        own.zero_grad()
    return t, refused


def trained_heads(stage: int, folder: str) -> dict[str, Any]:
    bench = Workbench(plain=False, stage=stage, folder=folder)
    t, refused = trained_head(bench)
    found: dict[str, Any] = {"averaged": t.engine.consolidated_state_dict(), "nothing": refused}
    bench.close()
    t, found["trained apart"] = trained_head(bench, averages=False)
    t.engine.zero_grad()
    for parameter in t.module[-1].parameters():
        dist.broadcast(parameter.data, 0)
    t.backward(F.mse_loss(t(bench.rows(7)), bench.rows(107)))
    t.step()
    bench.close()
    t, found["drawn apart"] = trained_head(bench, seed=dist.get_rank())
    t.engine.zero_grad()
    found["saved apart"] = []
    try:
        t.engine.save_checkpoint(folder, "x")
    except RuntimeError as error:
        found["saved apart"] = [str(error)]
    bench.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [(2, 0), (2, 3), (3, 2), *(pytest.param(n, s, marks=pytest.mark.soak) for n in (1, 2, 3) for s in range(4))],
)
def test_a_layer_put_in_later_and_trained_by_an_optimizer_of_its_own_has_to_be_the_same_on_every_rank(
    world_size: int, stage: int, tmp_path: Any
) -> None:
    wanted = trained_head(Workbench(plain=True))[0].module.state_dict()
    for rank, found in enumerate(run_ranks(trained_heads, world_size, stage, str(tmp_path))):
        assert found["nothing"] == []
        if rank == 0:
            check(found["averaged"], wanted, "averaged")
        for how in ("trained apart", "drawn apart", "saved apart"):
            assert bool(found[how]) == (world_size > 1), how
            for text in found[how]:
                assert "'5.weight' was put into the model after initialize" in text and "all_reduce" in text, how
