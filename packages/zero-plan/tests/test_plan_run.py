"""`zero-plan run`: the user's own script, up to its first steps."""

from __future__ import annotations

import json
import os
import site
import sys
from pathlib import Path
from typing import Any

import dry_models
import pytest
import torch

import zero_deepspeed
from zero_comm import run_ranks
from zero_core.engine import Engine
from zero_core.supervision import Unsupervised, supervised
from zero_core.training import Unobserved
from zero_launch.scripts import run_as_main
from zero_plan import PlanError, plan, plan_script
from zero_plan.cli import main
from zero_plan.dry_run.lines import PROJECT, user_line
from zero_plan.dry_run.script import fill_auto, plan_script_rank
from zero_plan.planned import Plan, RankPlan
from zero_plan.scripts import Script, ScriptRank

SCRIPTS = Path(__file__).parent / "scripts"
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1},
    "bf16": {"enabled": False},
}


def run(name: str, *arguments: str, rank: int = 1, world_size: int = 2, **config: Any) -> tuple[RankPlan, list[str]]:
    script = Script(str(SCRIPTS / name), arguments, config=config or None)
    return plan_script_rank(ScriptRank(script, rank, world_size, checkpoint=True))


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(zero_deepspeed.path()))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def test_a_plain_loop_is_what_plan_says_and_its_readings_are_told() -> None:
    case = dry_models.Case(stage=3, accumulation=3, zero=(("offload_optimizer", {"device": "nvme"}),))
    found, lines = run("plain.py", "9", **case.config())
    asked = {"batch": dry_models.tokens(), "world_size": 2, "ranks": [1], "checkpoint": True}
    [expected] = plan(case.model, case.config(), **asked).ranks
    assert (found.held, found.sent, found.files) == (expected.held, expected.sent, expected.files)
    assert (found.read, found.written) == (expected.read, expected.written)
    assert found.saved is not None and expected.saved is not None
    assert (found.saved.files, found.saved.linked) == (expected.saved.files, expected.saved.linked)
    assert found.peak.nbytes == pytest.approx(expected.peak.nbytes, rel=0.02)
    assert found.peak.activation_bytes == pytest.approx(expected.peak.activation_bytes, rel=0.02)
    assert any("plain.py, line" in line for line in lines)
    data = next(row for peak in found.peaks for row in peak.owners if row.kind == "data of the script")
    assert data.nbytes == 64 * dry_models.SEQUENCE * 8


def test_the_name_deepspeed_and_the_command(
    deepspeed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dry_models.Case(stage=3).config()
    (tmp_path / "ds.json").write_text(json.dumps(config))
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    command = ["run", str(SCRIPTS / "named_deepspeed.py"), "--world-size", "64", "--ranks-per-node", "8"]
    asked = [*command, "--rank", "9", "--checkpoint", "--json", "--", "--deepspeed_config", str(tmp_path / "ds.json")]
    assert main(asked) == 0
    printed = capsys.readouterr()
    assert "named_deepspeed.py, line" in printed.err
    [found] = Plan.from_dict(json.loads(printed.out)).ranks
    given = {**config, "comm": {"ranks_per_node": 8}}
    [expected] = plan(dry_models.decoder, given, batch=dry_models.tokens(), world_size=64, ranks=[9]).ranks
    assert found.held == expected.held
    assert found.sent_bytes() == expected.sent_bytes()
    links = found.bytes_by_link()
    assert found.saved is not None and found.saved.written > 0
    assert links["inside a node"] > 0 and links["between nodes"] > 0
    assert links["inside a node"] + links["between nodes"] == found.sent_bytes()


@pytest.mark.parametrize("saved_by", (None, 1))
def test_a_load_into_a_scripts_engine_is_what_plan_says(saved_by: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join([str(Path(__file__).parent), *filter(None, sys.path)]))
    case = dry_models.Case(stage=3)
    asked: dict[str, Any] = {"world_size": 2, "ranks": [1], "checkpoint": True, "saved_by": saved_by}
    script = Script(str(SCRIPTS / "plain.py"), ("3",), config=case.config())
    [found] = plan_script(script, **asked).plan.ranks
    [expected] = plan(case.model, case.config(), batch=dry_models.tokens(), **asked).ranks
    assert found.loaded is not None and expected.loaded is not None
    assert (found.loaded.saved_by, found.loaded.read) == (expected.loaded.saved_by, expected.loaded.read)
    assert found.loaded.peaks[0].nbytes == expected.loaded.peaks[0].nbytes
    assert found.saved is not None and found.saved.written > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\nx = torch.zeros(3).cuda()\n", r"s.py, line 2: .*computes on the CPU"),
        ("import torch\nm = torch.nn.Linear(3, 3).to('cuda')\n", r"s.py, line 2: .*computes on the CPU"),
        ("import torch\ntorch.distributed.init_process_group('gloo')\n", r"s.py, line 2: .*is initialized already|2: "),
        ("import torch\nx = torch.zeros(3).nonzero()\n", r"s.py, line 2: .*shapes and no values"),
        ("print('hello')\n", "s.py took no optimizer step"),
        ("import sys\nsys.exit(3)\n", "s.py, line 2: the script ended with status 3"),
        ("import sys\nsys.exit('no data')\n", 's.py, line 2: the script ended by sys.exit."no data".'),
        ("x = 1\nx.y\n", "s.py, line 2: AttributeError"),
        ("x = (\n", "s.py.*SyntaxError"),
    ],
)
def test_what_cannot_be_planned_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.py").write_text(text)
    with pytest.raises(PlanError, match=message):
        plan_script_rank(ScriptRank(Script(str(tmp_path / "s.py")), 0, 4))
    assert not torch.distributed.is_initialized()


TRAINS = """
import dry_models, torch, zero_core
{before}
engine = zero_core.initialize(model=dry_models.decoder(), config={config!r})[0]
for _ in range({steps}):
    engine.backward(engine{batch})
    engine.step()
{after}
"""


_WHOLE = {"before": "", "after": "", "steps": 9, "batch": "(**dry_models.tokens())"}


@pytest.mark.parametrize(
    ("parts", "changed", "message"),
    [
        ({"steps": 2}, {}, "s.py ended after 2 of the 3 optimizer steps"),
        ({}, {"zero_optimisation": {}}, r"s.py, line 4: ConfigError: .*zero_optimisation"),
        ({}, {"offload": {"activations": {"device": "cpu"}}}, "s.py, line 4: offload.activations.device"),
        (
            {"before": "dry_models.decoder = dry_models.Branching", "batch": "(torch.ones(2, 4))"},
            {},
            "dry_models.py, line ",
        ),
    ],
)
def test_what_the_engine_or_a_plan_refuses_names_the_line(
    tmp_path: Path, parts: dict[str, Any], changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_models, "decoder", dry_models.decoder)  # restored after a script that replaces it
    config = {**dry_models.Case().config(), **changed}
    text = TRAINS.format(**{**_WHOLE, "config": config, **parts})
    (tmp_path / "s.py").write_text(text)
    with pytest.raises(PlanError, match=message):
        plan_script_rank(ScriptRank(Script(str(tmp_path / "s.py")), 0, 4))


def test_a_model_function_that_needs_a_device_or_has_weights_is_refused_by_line() -> None:
    def needs_device() -> torch.nn.Module:
        return torch.nn.Linear(4, 4).cuda()

    def has_values() -> torch.nn.Module:
        module = torch.nn.Linear(4, 4)
        module.weight = torch.nn.Parameter(weight)
        return module

    weight, asked = torch.zeros(4, 4), {"batch": torch.zeros(2, 4), "loss": torch.sum, "world_size": 2, "ranks": [1]}
    for build, message in ((has_values, "has values"), (needs_device, "computes on the CPU")):
        with pytest.raises(PlanError, match=rf"model_fn: .*test_plan_run.py, line \d+: .*{message}"):
            plan(build, dry_models.Case().config(), **asked)


class Failing(torch.nn.Module):
    """Applies ``function`` to the output of a linear map."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.function = torch.nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x)).sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y: y @ torch.ones(3, 4), r"line \d+: RuntimeError: .*same reduction dim"),
        (lambda y: y.cuda(), r"line \d+: .*computes on the CPU"),
        (lambda y: y + torch.zeros(4, device="cuda"), r"line \d+: a dry run computes on the CPU"),
        (lambda y: y * y.detach().numpy().mean(), r"line \d+: .*shapes and no values"),
        (lambda y: y * len(f"{y.sum():.3f}"), r"line \d+: .*shapes and no values"),
    ],
)
def test_an_error_of_the_model_names_the_line_once_and_nothing_else_is_printed(
    function: Any, message: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {"batch": torch.zeros(2, 4), "world_size": 2, "ranks": [1]}
    with pytest.raises(PlanError, match="^" + str(Path(__file__)) + ", " + message) as found:
        plan(lambda: Failing(function), dry_models.Case().config(), **asked)
    assert str(found.value).count(__file__) == 1
    assert capfd.readouterr().err == "" and not caplog.records


def test_wrong_arguments_of_a_plan_are_one_sentence(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    def with_weights() -> torch.nn.Module:
        module = torch.nn.Linear(4, 4)
        module.load_state_dict(load_file(tmp_path / "w.safetensors"))
        return module

    save_file(torch.nn.Linear(4, 4).state_dict(), tmp_path / "w.safetensors")
    asked: dict[str, Any] = {"batch": torch.zeros(2, 4), "loss": torch.sum, "world_size": 2}
    for build, changed, message in (
        (with_weights, {}, r"test_plan_run.py, line \d+: .*reads no weights from files"),
        (torch.nn.Linear(4, 4), {}, "model_fn: expected a function that returns a model, got Linear, a model"),
        (lambda: torch.nn.Linear(4, 4), {"batch": {"y": torch.zeros(2, 4)}}, "the model's forward: TypeError: .*'y'"),
        (lambda: torch.nn.Linear(4, 4), {"loss": lambda y: y}, r"expected a scalar loss .* shape \(2, 4\)"),
        (lambda: torch.nn.Linear(4, 4), {"loss": lambda y: y.loss}, r"test_plan_run.py, line \d+: AttributeError"),
        (lambda: torch.nn.Linear(4, 4), {"ranks": []}, "ranks: expected at least one rank, got none"),
    ):
        with pytest.raises(PlanError, match=message):
            plan(build, dry_models.Case().config(), **{**asked, **changed})


def test_auto_is_what_the_script_says() -> None:
    asked = {"a": "auto", "b": {"c": "auto", "d": 3}, "e": "auto"}
    assert fill_auto(asked, {"a": 1, "b": {"c": 2, "d": 4}, "f": 5}) == {"a": 1, "b": {"c": 2, "d": 3}, "e": "auto"}
    assert fill_auto(None, {"a": 1}) == {"a": 1}


def test_a_process_that_dies_is_told_with_what_it_printed(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import os\nprint('last words', flush=True)\nos._exit(7)\n")
    with pytest.raises(PlanError, match=r"rank 2: .*ended with status 7(?s:.*)last words"):
        plan_script(Script(str(tmp_path / "s.py")), world_size=4, ranks=[2])
    with pytest.raises(PlanError, match="world_size: expected an integer >= 1, got 0"):
        plan_script(Script(str(tmp_path / "s.py")), world_size=0)
    with pytest.raises(PlanError, match="there is no script 'nobody.py'"):
        plan_script(Script("nobody.py"), world_size=4)


class Third(Unsupervised):
    """Keeps what an engine sent in its third step, and ends the script."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def observer(self, engine: Engine) -> Any:
        return _Third(engine, self)


class Ended(BaseException):
    """The third step is over."""


class _Third(Unobserved):
    def __init__(self, engine: Engine, observer: Third) -> None:
        self._engine, self._observer, self._steps = engine, observer, 0
        engine.ledger.reset()

    def after_step(self, result: Any) -> None:
        self._steps += 1
        if self._steps == 3:
            self._observer.sent = [(p, n, r.calls, r.sent_bytes, r.across_bytes) for p, n, r in self._engine.ledger]
            self._engine.destroy(unshard=False)
            raise Ended
        self._engine.ledger.reset()


def real(name: str, *arguments: str) -> list[tuple[Any, ...]]:
    sys.path.insert(0, str(zero_deepspeed.path()))
    sys.path.insert(0, str(Path(__file__).parent))
    observer = Third()
    with supervised(observer):
        try:
            run_as_main(str(SCRIPTS / name), arguments)
        except Ended:
            pass
    return observer.sent


@pytest.mark.soak
@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("name", ("trainer.py", "named_deepspeed.py"))
def test_what_a_script_sends_is_what_it_sends_in_a_real_run(
    name: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    config = {**AUTO, "zero_optimization": {**AUTO["zero_optimization"], "stage": stage}}
    if name == "named_deepspeed.py":
        config = dry_models.Case(stage=stage).config()
    (tmp_path / "ds.json").write_text(json.dumps(config))
    path = str(tmp_path / "ds.json")
    arguments = (path, str(tmp_path / "out")) if name == "trainer.py" else ("--deepspeed_config", path)
    sent = run_ranks(real, 2, name, *arguments)
    search = [str(zero_deepspeed.path()), str(Path(__file__).parent), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", ":".join(search))
    found = plan_script(Script(str(SCRIPTS / name), arguments), world_size=2).plan
    for rank in found.ranks:
        assert sorted(map(tuple, rank.sent)) == sorted(sent[rank.rank])


@pytest.mark.parametrize("folder", [site.getusersitepackages(), os.path.dirname(torch.__file__)])
def test_installed_packages_are_not_the_users_code_and_names_like_ours_are(folder: str, tmp_path: Path) -> None:
    def line_of(path: str, module: str) -> str | None:
        try:
            exec(compile("raise ValueError", path, "exec"), {"__name__": module})
        except ValueError as error:
            return user_line(error.__traceback__.tb_next)  # type: ignore[union-attr]
        return None

    assert line_of(f"{folder}/other/module.py", "other.module") is None
    assert line_of(str(tmp_path / "zero_shot.py"), "zero_shot") == f"{tmp_path / 'zero_shot.py'}, line 1"
    assert line_of(str(tmp_path / "plan.py"), "zero_plan.dry") is None


def test_a_dry_run_takes_no_line_of_any_of_the_projects_packages_for_the_users() -> None:
    packages = Path(__file__).parents[2]
    assert {
        folder.name.replace("-", "_") for folder in packages.iterdir() if (folder / "pyproject.toml").is_file()
    } == PROJECT
