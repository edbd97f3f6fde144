"""The folder on the search path: what `import deepspeed` means with it and without it."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import zero_deepspeed
from zero_core.errors import UsageError

ENTRY = zero_deepspeed.path()


def fresh(*command: str, named: bool = True, **variables: str) -> str:
    """What a new process prints, on both streams, with the folder on its path or without."""
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part != str(ENTRY)]
    search = os.pathsep.join([str(ENTRY), *parts] if named else parts)
    kept_out = ("DS_", "PYTEST", "COV", "ZERO_TORCH_UNCOLLECTED")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(kept_out)}
    done = subprocess.run(
        [sys.executable, *command],
        env={**environment, "PYTHONPATH": search, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


FRAMEWORKS_LOOK = """
import importlib.metadata, importlib.util
import deepspeed
found = importlib.util.find_spec("deepspeed").origin
print(found, importlib.metadata.metadata("deepspeed")["Name"], importlib.metadata.version("deepspeed"))
assert deepspeed.__version__ == importlib.metadata.version("deepspeed")
"""


def test_python_m_prints_the_folder_for_the_search_path() -> None:
    assert fresh("-m", "zero_deepspeed", named=False).strip() == str(ENTRY)
    assert fresh("-m", "zero_deepspeed", "--bin", named=False).strip() == str(ENTRY / "bin")


def test_with_the_folder_the_package_and_its_metadata_are_found() -> None:
    place, name, version = fresh("-c", FRAMEWORKS_LOOK).split()
    assert Path(place).is_relative_to(ENTRY)
    assert (name, version) == ("deepspeed", zero_deepspeed.VERSION)


def test_without_it_nothing_is_visible() -> None:
    code = "import zero_core, importlib.util as u; s = u.find_spec('deepspeed'); print(s and s.origin)"
    assert str(ENTRY) not in fresh("-c", code, named=False)


def test_importing_prints_nothing_and_changes_no_variable() -> None:
    code = "import os; b = dict(os.environ); import deepspeed; from deepspeed import DeepSpeedEngine, zero; "
    assert fresh("-c", code + "assert b == dict(os.environ)", PATH="/nowhere") == ""


def test_importing_costs_at_most_200_ms_of_processor_time_beyond_torch() -> None:
    code = "import time, torch; t = time.process_time(); import deepspeed; print(time.process_time() - t)"
    fresh("-c", code)
    assert statistics.median(float(fresh("-c", code)) for _ in range(3)) <= 0.2


def test_activate_makes_the_name_mean_this_project_in_the_process() -> None:
    code = "import zero_deepspeed as n; n.activate(); n.activate(); import deepspeed; print(deepspeed.__file__)"
    assert Path(fresh("-c", code, named=False).strip()).is_relative_to(ENTRY)


def test_activate_is_refused_when_another_deepspeed_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = type(sys)("deepspeed")
    other.__file__ = str(tmp_path / "deepspeed" / "__init__.py")
    monkeypatch.setitem(sys.modules, "deepspeed", other)
    with pytest.raises(UsageError, match="imported already"):
        zero_deepspeed.activate()


def test_activate_is_refused_when_a_framework_has_looked_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(ENTRY)])
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setitem(sys.modules, "accelerate", type(sys)("accelerate"))
    with pytest.raises(UsageError, match="accelerate is imported already"):
        zero_deepspeed.activate()


EVERY_NAME = """
import importlib, json
from zero_deepspeed.names import NAMES, Unavailable
answered, absent, refused, asked = 0, {}, [], 0
for module, names in NAMES.items():
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        absent[module] = str(error)
        continue
    for name, home in names.items():
        value = getattr(found, name)
        if not isinstance(home, Unavailable):
            answered += 1
            continue
        asked += 1
        try:
            value(1, two=2)
        except NotImplementedError as error:
            refused.append(str(error))
print(json.dumps([answered, absent, refused, asked]))
"""


def test_every_name_leads_somewhere_and_every_refusal_says_what_to_use() -> None:
    answered, absent, refused, asked = json.loads(fresh("-c", EVERY_NAME).splitlines()[-1])
    assert answered > 230
    experts = "moe.experts moe.layer moe.sharded_moe"
    missing = f"compression inference module_inject {experts} profiling sequence"
    assert sorted(absent) == [f"deepspeed.{name}" for name in missing.split()]
    assert all(f"{name} is not available in zero-deepspeed: " in message for name, message in absent.items())
    assert len(refused) == asked > 30
    assert all("is not available in zero-deepspeed: " in message for message in refused)


PIPELINES = """
import deepspeed.pipe
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import nn
assert not isinstance(nn.Linear(1, 1), PipelineModule)
mine = type("Mine", (PipelineModule,), {})
for made in (deepspeed.PipelineModule, PipelineModule, mine, LayerSpec, PipelineParallelGrid):
    try:
        made(layers=[nn.Linear(1, 1)], num_stages=2)
    except NotImplementedError as error:
        print(error)
"""


def test_scripts_that_import_pipelines_run_and_are_refused_by_name_when_they_make_one() -> None:
    said = fresh("-c", PIPELINES).splitlines()
    names = (
        "PipelineModule",
        *["pipe.PipelineModule"] * 2,
        "pipe.LayerSpec",
        "runtime.pipe.topology.PipelineParallelGrid",
    )
    for name, line in zip(names, said, strict=True):
        assert line == (
            f"deepspeed.{name} is not available in zero-deepspeed: "
            "train the model with ZeRO stage 3, which needs no stages; its engine has train_batch too"
        )


IMPORTS = """
import importlib.util as util, pickle, sys
import deepspeed
before = set(sys.modules)
assert util.find_spec("deepspeed.runtime.zero.stage3").name == "deepspeed.runtime.zero.stage3"
assert util.find_spec("deepspeed.ops.adam.none_such") is None and util.find_spec("deepspeed.none_such") is None
import deepspeed.ops.adam
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.config import ZeroStageEnum
assert deepspeed.ops.adam.DeepSpeedCPUAdam is DeepSpeedCPUAdam is deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam
assert "stage3" in dir(deepspeed.runtime.zero) and "compression" not in dir(deepspeed)
assert pickle.loads(pickle.dumps(ZeroStageEnum.weights)) is ZeroStageEnum.weights
assert pickle.loads(b"cdeepspeed.runtime.zero.partition_parameters\\nZeroParamStatus\\n.").AVAILABLE.value == 1
assert pickle.loads(pickle.dumps(deepspeed.zero.Init)) is deepspeed.runtime.zero.Init
for statement in ("import deepspeed.moe.layer", "from deepspeed.moe.layer import A", "from deepspeed.moe import layer"):
    try:
        exec(statement)
    except ImportError as error:
        assert "train the experts as plain modules" in str(error), error
    else:
        raise AssertionError(statement)
try:
    import deepspeed.none_such
except ModuleNotFoundError as error:
    assert error.name == "deepspeed.none_such"
assert not hasattr(deepspeed, "compression") and not hasattr(deepspeed.ops, "none_such")
"""


def test_submodules_specs_and_pickled_references_are_found_as_files_are() -> None:
    assert fresh("-c", IMPORTS) == ""


LEAVES = ("from deepspeed.utils import z3_leaf_module", "from deepspeed.utils.z3_leaf_module import z3_leaf_module")


@pytest.mark.parametrize("first, second", [LEAVES, LEAVES[::-1]], ids=["package first", "module first"])
def test_a_name_covers_the_submodule_of_the_same_name_in_any_order(first: str, second: str) -> None:
    code = f"{first} as one\n{second} as other\nimport deepspeed; assert one is other is deepspeed.utils.z3_leaf_module"
    assert fresh("-c", code + "; from torch import nn; assert one(nn.Linear(1, 1)) is False") == ""


@pytest.mark.parametrize(
    "module, shown",
    [("deepspeed", "zero-launch"), ("deepspeed.launcher.runner", "zero-launch"), ("deepspeed.utils.zero_to_fp32", "")],
)
def test_modules_with_a_main_run_as_commands(module: str, shown: str) -> None:
    assert f"usage: {shown}" in fresh("-m", module, "--help")


def test_the_version_of_this_package_says_which_deepspeed() -> None:
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    own = re.search(r'^version = "(.*)"$', text, re.MULTILINE)
    assert own is not None and re.fullmatch(rf"{re.escape(zero_deepspeed.VERSION)}(\.post\d+)?", own[1])


def test_an_unknown_name_is_an_attribute_error_with_the_nearest_one() -> None:
    code = "import deepspeed\ntry: deepspeed.initialise\nexcept AttributeError as e: print(e)"
    assert "did you mean 'initialize'?" in fresh("-c", code)


def test_ds_report_names_versions_and_operators() -> None:
    printed = fresh(str(ENTRY / "bin" / "ds_report"))
    assert f"deepspeed {zero_deepspeed.VERSION}" in printed
    assert "operator cpu_adam: yes" in printed


def test_the_deepspeed_command_starts_ranks_that_see_the_names(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, deepspeed\ndeepspeed.init_distributed()\n"
        "print('rank', deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), sys.argv[1:], flush=True)\n"
    )
    printed = fresh(str(ENTRY / "bin" / "deepspeed"), "--num_gpus", "2", str(script), "--epochs", "3", named=False)
    for rank in range(2):
        assert f"rank {rank} 2 ['--local_rank={rank}', '--epochs', '3']" in printed


def test_zero_launch_has_the_names_on_request(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import shutil, deepspeed\nprint(deepspeed.__file__, shutil.which('ds_report'))\n")
    printed = fresh("-m", "zero_launch", "--as-deepspeed", "--nproc", "1", str(script), named=False)
    assert str(ENTRY / "deepspeed") in printed and str(ENTRY / "bin") in printed
