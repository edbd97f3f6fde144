"""Modules, optimizers and stateful objects come back bit for bit, and the next step is the one that would have come."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import zero_ckpt  # noqa: E402
from zero_ckpt import CheckpointError, Interval, MismatchError, NotPlainDataError, open_checkpoint  # noqa: E402
from zero_ckpt.torch import RngState  # noqa: E402


class Tied(nn.Module):
    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, dtype=dtype)
        self.head = nn.Linear(width, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.dropout(self.norm(self.embed(x)), 0.1, self.training))


class Run:
    """A training run: everything that has to survive."""

    def __init__(self, seed: int, optimizer: str = "AdamW", dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.model = Tied(dtype=dtype)
        options: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {}
        groups = [{"params": [self.model.embed.weight], "lr": 0.02}, {"params": list(self.model.norm.parameters())}]
        self.optimizer = getattr(torch.optim, optimizer)(groups, lr=0.01, **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "rng": RngState(),
            "epoch": seed,
        }

    def step(self) -> float:
        x = torch.randint(0, 11, (16,))
        loss = nn.functional.cross_entropy(self.model(x).float(), (x + random.randrange(2)) % 11)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "RMSprop", "Adafactor"])
def test_the_next_steps_are_bitwise_those_of_the_uninterrupted_run(
    tmp_path: Path, optimizer: str, dtype: torch.dtype
) -> None:
    one = Run(1, optimizer, dtype)
    for _ in range(3):
        one.step()
    zero_ckpt.save(tmp_path, one.state, step=3)
    expected = [one.step() for _ in range(3)]
    other = Run(2, optimizer, dtype)
    report = zero_ckpt.load(tmp_path, other.state)
    assert not report.defaulted and not report.ignored and not report.converted and report.step == 3
    assert other.state["epoch"] == 1
    assert [other.step() for _ in range(3)] == expected
    for mine, theirs in zip(other.model.state_dict().values(), one.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    zero_ckpt.save(tmp_path, {"model": Tied()})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.aliases == {"head.weight": "embed.weight"}
    assert ("head.weight", "param") not in checkpoint.tensors and ("scratch", "buffer") not in checkpoint.tensors
    model = Tied()
    zero_ckpt.load(tmp_path, {"model": model})
    assert model.head.weight is model.embed.weight


def test_a_tied_parameter_is_found_under_its_other_name(tmp_path: Path) -> None:
    class HeadFirst(Tied):
        def __init__(self) -> None:
            super().__init__()
            self._modules["embed"] = self._modules.pop("embed")

    def build(kind: type[Tied]) -> tuple[Tied, torch.optim.Optimizer]:
        model = kind()
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build(Tied)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    zero_ckpt.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, loaded = build(HeadFirst)
    assert next(name for name, _ in other.named_parameters()) != "embed.weight"
    zero_ckpt.load(tmp_path, {"model": other, "optimizer": loaded})
    assert torch.equal(other.head.weight, model.head.weight)
    assert torch.equal(loaded.state[other.head.weight]["exp_avg"], optimizer.state[model.head.weight]["exp_avg"])


def test_strict_names_what_is_missing_on_either_side_and_a_report_says_what_fits(tmp_path: Path) -> None:
    zero_ckpt.save(tmp_path, {"model": nn.ModuleDict({"a": nn.Linear(2, 2), "old": nn.Linear(2, 2)})})
    target = nn.ModuleDict({"a": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
    before = target["a"].weight.clone()
    with pytest.raises(MismatchError, match=r"not in the checkpoint \(2\): new.weight \(param\)") as caught:
        zero_ckpt.load(tmp_path, {"model": target})
    assert "only in the checkpoint (2): old.weight (param)" in str(caught.value)
    assert torch.equal(target["a"].weight, before)
    report = zero_ckpt.load(tmp_path, {"model": target}, strict=False)
    assert report.loaded == ["a.weight (param)", "a.bias (param)"]
    assert report.defaulted == ["new.weight (param)", "new.bias (param)"]
    assert report.ignored == ["old.weight (param)", "old.bias (param)"]
    report = zero_ckpt.load(tmp_path, {"model": target}, rename=lambda name: name.replace("new", "old"))
    assert len(report.loaded) == 4 and "4 loaded" in str(report)


def test_module_only(tmp_path: Path) -> None:
    one, other = Run(1), Run(2)
    one.step()
    zero_ckpt.save(tmp_path, one.state, step=1)
    report = zero_ckpt.load(tmp_path, {"model": other.model})
    assert report.not_requested == ["exp_avg", "exp_avg_sq", "step"]
    assert torch.equal(other.model.embed.weight, one.model.embed.weight) and not other.optimizer.state


def test_optimizer_only(tmp_path: Path) -> None:
    one, other = Run(1), Run(2)
    one.step()
    zero_ckpt.save(tmp_path, one.state, step=1)
    before = other.model.embed.weight.detach().clone()
    report = zero_ckpt.load(tmp_path, {"optimizer": other.optimizer})
    assert report.not_requested == ["buffer", "param"] and not report.ignored and not report.defaulted
    assert torch.equal(other.model.embed.weight, before)
    assert other.optimizer.state_dict()["param_groups"] == one.optimizer.state_dict()["param_groups"]
    states = [run.optimizer.state_dict()["state"] for run in (one, other)]
    assert states[0].keys() == states[1].keys() == {0, 1, 2}
    for index, mine in states[0].items():
        assert all(torch.equal(states[1][index][key], value) for key, value in mine.items())


def test_an_optimizer_saved_alone_is_loaded_alone(tmp_path: Path) -> None:
    one, other = Run(1), Run(2)
    one.step()
    zero_ckpt.save(tmp_path, {"optimizer": one.optimizer})
    zero_ckpt.load(tmp_path, {"optimizer": other.optimizer})
    weights = one.model.norm.weight, other.model.norm.weight
    assert torch.equal(one.optimizer.state[weights[0]]["exp_avg"], other.optimizer.state[weights[1]]["exp_avg"])
    smaller = torch.optim.AdamW([{"params": [other.model.embed.weight]}, {"params": [other.model.norm.weight]}])
    with pytest.raises(MismatchError, match=r"only in the checkpoint \(3\): optimizer.1.1 \(step\)"):
        zero_ckpt.load(tmp_path, {"optimizer": smaller})


def test_a_refused_load_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "old": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    zero_ckpt.save(tmp_path, {"model": model, "optimizer": optimizer})
    target = nn.ModuleDict({"a": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
    fresh = torch.optim.AdamW(target.parameters(), lr=0.25)
    with pytest.raises(MismatchError, match="old.weight"):
        zero_ckpt.load(tmp_path, {"model": target, "optimizer": fresh})
    assert not fresh.state and fresh.param_groups[0]["lr"] == 0.25


def test_configuration_and_node_are_kept(tmp_path: Path) -> None:
    zero_ckpt.save(tmp_path, {"model": nn.Linear(2, 2)}, config={"lr": 0.5}, node="here")
    assert open_checkpoint(tmp_path).config == {"lr": 0.5}


def test_shapes_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    zero_ckpt.save(tmp_path, {"model": Tied(8)})
    with pytest.raises(MismatchError, match=r"'embed.weight' has shape \(11, 9\), .* has \(11, 8\)"):
        zero_ckpt.load(tmp_path, {"model": Tied(9)})


def test_another_dtype_is_converted_and_reported_and_the_master_is_preferred(tmp_path: Path) -> None:
    master = torch.randn(4, dtype=torch.float32)
    half = master.bfloat16()
    intervals = [
        Interval("weight", kind, (2, 2), name, 0, bytes(zero_ckpt.torch.tensor_buffer(value)))
        for kind, name, value in (("param", "BF16", half), ("master", "F32", master))
    ]
    zero_ckpt.save_sharded(tmp_path, "t", intervals, step=1)
    for dtype, expected, converted in (
        (torch.float32, master, False),
        (torch.bfloat16, half, False),
        (torch.float64, master.double(), True),
    ):
        model = nn.Linear(2, 2, bias=False, dtype=dtype)
        report = zero_ckpt.load(tmp_path, {"model": model})
        assert torch.equal(model.weight.detach().view(-1), expected)
        assert bool(report.converted) == converted


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    zero_ckpt.save(tmp_path, {"model": model}, exclude_frozen=True)
    assert list(open_checkpoint(tmp_path).tensors) == [("bias", "param")]


def test_several_modules_are_stored_under_their_keys(tmp_path: Path) -> None:
    state = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
    zero_ckpt.save(tmp_path, state)
    assert ("critic.weight", "param") in open_checkpoint(tmp_path).tensors
    zero_ckpt.load(tmp_path, {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})


class Counter:
    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def test_stateful_objects_keep_tensors_tuples_and_number_keys(tmp_path: Path) -> None:
    held = {"t": torch.arange(3), "nested": [{"u": torch.ones(2, dtype=torch.bfloat16)}], 3: (1, (2,)), "$odd": None}
    zero_ckpt.save(tmp_path, {"counter": Counter(held), "bare": torch.arange(4), "gen": torch.Generator()})
    loaded = Counter({})
    state = {"counter": loaded, "bare": torch.zeros(4, dtype=torch.int64), "gen": torch.Generator()}
    zero_ckpt.load(tmp_path, state)
    assert loaded.state[3] == (1, (2,)) and loaded.state["$odd"] is None
    assert torch.equal(loaded.state["t"], held["t"]) and loaded.state["nested"][0]["u"].dtype == torch.bfloat16
    assert state["bare"].tolist() == [0, 1, 2, 3]


def test_what_is_neither_tensor_nor_plain_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(NotPlainDataError, match=r"counter\.a\.0 is a builtins\.object"):
        zero_ckpt.save(tmp_path, {"counter": Counter({"a": [object()]})})


@pytest.mark.parametrize("key", [torch.ones(2), (1, torch.ones(2))], ids=["a tensor", "a tuple with one"])
def test_a_tensor_in_a_key_is_refused_by_the_path_of_its_dict(tmp_path: Path, key: object) -> None:
    with pytest.raises(NotPlainDataError, match=r"counter\.a has a tensor of shape \(2,\) in a key"):
        zero_ckpt.save(tmp_path, {"counter": Counter({"a": {key: 1}})})


def test_param_groups_that_do_not_match_are_refused(tmp_path: Path) -> None:
    one = Run(1)
    zero_ckpt.save(tmp_path, one.state)
    flat = torch.optim.AdamW(one.model.parameters())
    with pytest.raises(CheckpointError, match="'optimizer' has 1 param groups, the checkpoint has 2"):
        zero_ckpt.load(tmp_path, {"model": one.model, "optimizer": flat})


def test_wrappers_of_ddp_and_compile_leave_no_trace_in_names(tmp_path: Path) -> None:
    zero_ckpt.save(tmp_path, {"model": torch.compile(nn.Sequential(nn.Linear(2, 2)))})
    assert list(open_checkpoint(tmp_path).tensors) == [("0.weight", "param"), ("0.bias", "param")]


def test_a_checkpoint_of_another_writer_loads_by_names_and_kinds_alone(tmp_path: Path) -> None:
    from zero_ckpt.torch import tensor_buffer

    moment, step = torch.randn(2, 2), torch.tensor(7.0)
    zero_ckpt.save_sharded(
        tmp_path,
        "t",
        [
            Interval("weight", "param", (2, 2), "F32", 0, tensor_buffer(moment + 1)),
            Interval("weight", "exp_avg", (2, 2), "F32", 0, tensor_buffer(moment)),
            Interval("weight", "exp_avg_sq", (2, 2), "F32", 0, tensor_buffer(moment.abs())),
            Interval("weight", "step.scalar", (), "F32", 0, tensor_buffer(step)),
        ],
        step=7,
        client_state={"param_groups": [{"lr": 0.25, "betas": [0.5, 0.75], "fused": True}]},
    )
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    report = zero_ckpt.load(tmp_path, {"model": model, "optimizer": optimizer})
    assert not report.ignored and not report.defaulted
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moment)
    assert optimizer.state[model.weight]["step"] == 7.0
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["fused"]) == (0.25, (0.5, 0.75), None)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    (universal,) = zero_ckpt.convert(tmp_path, tmp_path / "universal", to="deepspeed-universal")
    assert torch.load(universal / "zero" / "weight" / "step.pt", weights_only=True) == 7.0
    common = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=True)
    assert common["param_groups"] == [{"lr": 0.25, "betas": (0.5, 0.75)}]
