"""Training continues from a saved state as if it had never stopped, at any tier and from torch's own optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from zero_offload import OffloadedOptimizer

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2},
}


def fresh_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 130), nn.ReLU(), nn.Linear(130, 40)).to(dtype)


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def tier_options(tier: str, tmp_path: Path) -> dict[str, Any]:
    if tier == "host":
        return {}
    return {"tier": "nvme", "path": tmp_path / "swap", "sub_group_size": 4096, "buffer_count": 2, "verify": True}


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("source", "target"), [("host", "nvme"), ("nvme", "host"), ("nvme", "nvme")])
def test_a_resumed_run_is_the_same_to_the_bit(
    tmp_path: Path, source: str, target: str, dtype: torch.dtype, model_first: bool
) -> None:
    model = fresh_model(dtype)
    with OffloadedOptimizer(model, lr=1e-2, **tier_options(source, tmp_path)) as optimizer:
        go_on(model, optimizer, range(3))
        file = tmp_path / "saved.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        go_on(model, optimizer, range(3, 6))
    resumed = fresh_model(dtype)
    with OffloadedOptimizer(resumed, lr=0.5, **tier_options(target, tmp_path)) as optimizer:
        go_on(resumed, optimizer, range(70, 72))
        saved = torch.load(file, weights_only=True)
        if model_first:
            resumed.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if not model_first:
            resumed.load_state_dict(saved["model"])
        go_on(resumed, optimizer, range(3, 6))
    assert torch.equal(weights(resumed), weights(model))


@pytest.mark.parametrize("delayed", [False, True])
def test_a_state_that_does_not_fit_leaves_all_as_it_was(delayed: bool) -> None:
    narrow, wide = fresh_model(), fresh_model()
    options: dict[str, Any] = {"gradients": "host", "delayed": True} if delayed else {}
    with OffloadedOptimizer(narrow, lr=0.5, state_dtype=torch.int8) as optimizer:
        go_on(narrow, optimizer, range(2))
        saved = optimizer.state_dict()
    with OffloadedOptimizer(wide, lr=1e-2, **options) as optimizer:
        go_on(wide, optimizer, range(2))
        before = optimizer.state_dict()
        with pytest.raises(ValueError, match="8-bit codes"):
            optimizer.load_state_dict(saved)
        after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert len(after["state"]) == len(before["state"]) == 4
    for number, state in before["state"].items():
        assert all(torch.equal(after["state"][number][kind], value) for kind, value in state.items())


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_state_goes_to_torch_and_back(tmp_path: Path, name: str, named: bool) -> None:
    kind = getattr(torch.optim, name)
    first, second = fresh_model(), fresh_model()
    for model in (first, second):
        model[0].bias.requires_grad_(False)  # type: ignore[index]
    theirs = kind(first.named_parameters() if named else first.parameters(), **KINDS[name])
    go_on(first, theirs, range(2))
    with OffloadedOptimizer(second, name, **KINDS[name], **tier_options("nvme", tmp_path)) as ours:
        second.load_state_dict(first.state_dict())
        ours.load_state_dict(theirs.state_dict())
        go_on(first, theirs, range(2, 4))
        go_on(second, ours, range(2, 4))
        assert torch.allclose(weights(second), weights(first), rtol=1e-5, atol=1e-7)
        first.load_state_dict(second.state_dict())
        theirs.load_state_dict(ours.state_dict())
        go_on(first, theirs, range(4, 6))
        go_on(second, ours, range(4, 6))
    assert torch.allclose(weights(second), weights(first), rtol=1e-5, atol=1e-7)


def test_the_state_is_plain_tensors_in_the_shape_of_torch() -> None:
    model = fresh_model()
    reference = torch.optim.AdamW(fresh_model().parameters(), lr=1e-2)
    with OffloadedOptimizer(model, lr=1e-2) as optimizer:
        assert optimizer.state_dict()["state"] == {}
        go_on(model, optimizer, range(1))
        saved = optimizer.state_dict()
    go_on(fresh_model(), reference, range(0))
    assert list(saved) == list(reference.state_dict())
    assert list(saved["state"]) == [0, 1, 2, 3]
    assert {kind: tuple(t.shape) for kind, t in saved["state"][0].items()} == {
        "step": (),
        "exp_avg": (130, 40),
        "exp_avg_sq": (130, 40),
    }
    assert set(reference.state_dict()["param_groups"][0]) <= set(saved["param_groups"][0])


def test_eight_bit_states_are_saved_as_they_are_and_made_from_torchs(tmp_path: Path) -> None:
    model = fresh_model()
    with OffloadedOptimizer(model, lr=1e-2, state_dtype=torch.int8) as optimizer:
        go_on(model, optimizer, range(3))
        saved = optimizer.state_dict()
        kept = {name: weight.clone() for name, weight in model.state_dict().items()}
        go_on(model, optimizer, range(3, 5))
    state = saved["state"][0]
    assert (state["exp_avg"].dtype, state["exp_avg"].shape) == (torch.uint8, (130, 40))
    assert state["exp_avg_scale"].shape == (21,)
    resumed = fresh_model()
    options = {**tier_options("nvme", tmp_path), "state_dtype": torch.int8}
    with OffloadedOptimizer(resumed, lr=1e-2, **options) as optimizer:
        resumed.load_state_dict(kept)
        optimizer.load_state_dict(saved)
        go_on(resumed, optimizer, range(3, 5))
        assert torch.equal(weights(resumed), weights(model))
        reference = fresh_model()
        theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        go_on(reference, theirs, range(2))
        resumed.load_state_dict(reference.state_dict())
        optimizer.load_state_dict(theirs.state_dict())
        before = weights(reference).clone()
        go_on(reference, theirs, range(2, 3))
        go_on(resumed, optimizer, range(2, 3))
    # Three bits of mantissa are a sixteenth; a step from fresh states differs by more than its own length.
    assert float((weights(resumed) - weights(reference)).norm() / (weights(reference) - before).norm()) < 1 / 16


def test_the_state_can_be_kept_in_safetensors(tmp_path: Path) -> None:
    model = fresh_model(torch.bfloat16)
    with OffloadedOptimizer(model, lr=1e-2) as optimizer:
        go_on(model, optimizer, range(2))
        saved = optimizer.state_dict()
        flat = {f"{number}.{kind}": t for number, state in saved["state"].items() for kind, t in state.items()}
        safetensors.torch.save_file(flat, tmp_path / "state.safetensors")
        before = weights(model).clone()
        go_on(model, optimizer, range(2, 3))
        loaded: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in safetensors.torch.load_file(tmp_path / "state.safetensors").items():
            number, _, kind = key.partition(".")
            loaded.setdefault(int(number), {})[kind] = tensor
        after = weights(model).clone()
        nn.utils.vector_to_parameters(before, model.parameters())
        optimizer.load_state_dict({"state": loaded, "param_groups": saved["param_groups"]})
        go_on(model, optimizer, range(2, 3))
    assert torch.equal(weights(model), after)


def test_the_state_on_nvme_is_sealed_for_a_checkpoint_to_link(tmp_path: Path) -> None:
    model = fresh_model(torch.bfloat16)
    with OffloadedOptimizer(model, lr=1e-2, **tier_options("nvme", tmp_path)) as optimizer:
        go_on(model, optimizer, range(2))
        saved = optimizer.state_dict()["state"]
        sealed = optimizer.seal()
        assert sealed is not None
        links = sealed.link_to(tmp_path / "checkpoint")
        go_on(model, optimizer, range(2, 5))
    assert dict(sealed.steps) == {name: 2 for name, _ in model.named_parameters()}
    for number, (name, _) in enumerate(model.named_parameters()):
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            parts = []
            for extent in sealed.extents[f"{name}/{kind}"]:
                with safetensors.safe_open(links[extent.path], framework="pt") as file:
                    parts.append(file.get_tensor(extent.key))
            assert torch.equal(torch.cat(parts), saved[number][kind].flatten())


def test_parameters_without_state_begin_anew() -> None:
    model = fresh_model()
    with OffloadedOptimizer(model, lr=1e-2) as optimizer:
        go_on(model, optimizer, range(2))
        saved = optimizer.state_dict()
        del saved["state"][1]
        optimizer.load_state_dict(saved)
        assert set(optimizer.state_dict()["state"]) == {0, 2, 3}
        go_on(model, optimizer, range(2, 3))
        steps = {number: float(state["step"]) for number, state in optimizer.state_dict()["state"].items()}
    assert steps == {0: 3.0, 1: 1.0, 2: 3.0, 3: 3.0}


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = fresh_model()
    with OffloadedOptimizer(model, lr=1e-2) as optimizer:
        go_on(model, optimizer, range(2))
        saved = optimizer.state_dict()
        before = {n: {k: t.clone() for k, t in s.items()} for n, s in saved["state"].items()}
        saved["state"][2]["exp_avg"] = torch.zeros(3)
        with pytest.raises(ValueError, match="'2.weight': saved 'exp_avg' has shape \\(3,\\)"):
            optimizer.load_state_dict(saved)
        del saved["state"][2]["exp_avg"]
        with pytest.raises(ValueError, match="'2.weight': the saved state has no 'exp_avg', only exp_avg_sq, step"):
            optimizer.load_state_dict(saved)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[n][k], t) for n, state in before.items() for k, t in state.items())


def test_options_that_change_which_states_there_are_are_refused() -> None:
    model = fresh_model()
    with OffloadedOptimizer(model, "SGD", lr=1e-2, momentum=0.9) as optimizer:
        go_on(model, optimizer, range(1))
        optimizer.param_groups[0]["momentum"] = 0.0
        with pytest.raises(ValueError, match="change which states there are.*momentum_buffer"):
            optimizer.step()


def test_it_is_not_copied_or_pickled_by_accident() -> None:
    import copy

    with OffloadedOptimizer(fresh_model()) as optimizer, pytest.raises(TypeError, match="save its state_dict"):
        copy.deepcopy(optimizer)
