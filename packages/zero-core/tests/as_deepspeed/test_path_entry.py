"""The folder on the search path: what `import deepspeed` means with it and without it."""

from __future__ import annotations

import ast
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from zero_core import as_deepspeed
from zero_core.errors import UsageError

ENTRY = as_deepspeed.path()


def fresh(*command: str, named: bool = True, **variables: str) -> str:
    """What a new process prints, on both streams, with the folder on its path or without."""
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part != str(ENTRY)]
    search = os.pathsep.join([str(ENTRY), *parts] if named else parts)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("DS_", "PYTEST", "COV"))}
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
    assert fresh("-m", "zero_core.as_deepspeed", named=False).strip() == str(ENTRY)
    assert fresh("-m", "zero_core.as_deepspeed", "--bin", named=False).strip() == str(ENTRY / "bin")


def test_with_the_folder_the_package_and_its_metadata_are_found() -> None:
    place, name, version = fresh("-c", FRAMEWORKS_LOOK).split()
    assert Path(place).is_relative_to(ENTRY)
    assert (name, version) == ("deepspeed", as_deepspeed.VERSION)


def test_without_it_nothing_is_visible() -> None:
    code = "import zero_core, importlib.util as u; s = u.find_spec('deepspeed'); print(s and s.origin)"
    assert str(ENTRY) not in fresh("-c", code, named=False)


def test_importing_prints_nothing_and_changes_no_variable() -> None:
    code = "import os; b = dict(os.environ); import deepspeed; from deepspeed import DeepSpeedEngine, zero; "
    assert fresh("-c", code + "assert b == dict(os.environ)", PATH="/nowhere") == ""


def test_importing_costs_at_most_200_ms_beyond_torch() -> None:
    code = "import time, torch; t = time.perf_counter(); import deepspeed; print(time.perf_counter() - t)"
    fresh("-c", code)
    assert statistics.median(float(fresh("-c", code)) for _ in range(3)) <= 0.2


def test_activate_makes_the_name_mean_this_project_in_the_process() -> None:
    code = "import zero_core.as_deepspeed as n; n.activate(); n.activate(); import deepspeed; print(deepspeed.__file__)"
    assert Path(fresh("-c", code, named=False).strip()).is_relative_to(ENTRY)


def test_activate_is_refused_when_another_deepspeed_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = type(sys)("deepspeed")
    other.__file__ = str(tmp_path / "deepspeed" / "__init__.py")
    monkeypatch.setitem(sys.modules, "deepspeed", other)
    with pytest.raises(UsageError, match="imported already"):
        as_deepspeed.activate()


def test_activate_is_refused_when_a_framework_has_looked_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(ENTRY)])
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setitem(sys.modules, "accelerate", type(sys)("accelerate"))
    with pytest.raises(UsageError, match="accelerate is imported already"):
        as_deepspeed.activate()


MODULES = sorted(
    ".".join(path.relative_to(ENTRY).with_suffix("").parts).removesuffix(".__init__")
    for path in (ENTRY / "deepspeed").rglob("*.py")
    if path.name != "__main__.py"
)

EVERY_NAME = """
import importlib, json, sys
found, absent, refused, asked = 0, {}, [], 0
for name in json.loads(sys.argv[1]):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        absent[name] = str(error)
        continue
    for attribute in getattr(module, "_FOUND", {}):
        getattr(module, attribute)
        found += 1
    for attribute in getattr(module, "_REFUSED", {}):
        asked += 1
        try:
            getattr(module, attribute)(1, two=2)
        except NotImplementedError as error:
            refused.append(str(error))
print(json.dumps([found, absent, refused, asked]))
"""


def test_every_name_leads_somewhere_and_every_refusal_says_what_to_use() -> None:
    found, absent, refused, asked = json.loads(fresh("-c", EVERY_NAME, json.dumps(MODULES)).splitlines()[-1])
    assert found > 150
    assert sorted(absent) == [
        f"deepspeed.{name}"
        for name in """compression inference module_inject moe pipe profiling runtime.pipe runtime.sequence_parallel
        sequence""".split()
    ]
    assert all(f"{name} is not available" in message for name, message in absent.items())
    assert len(refused) == asked > 20
    assert all("is not available in zero_core.as_deepspeed: " in message for message in refused)


def test_an_unknown_name_is_an_attribute_error_with_the_nearest_one() -> None:
    code = "import deepspeed\ntry: deepspeed.initialise\nexcept AttributeError as e: print(e)"
    assert "did you mean 'initialize'?" in fresh("-c", code)


def test_the_modules_that_map_names_have_no_logic() -> None:
    for name in MODULES:
        path = ENTRY / name.replace(".", "/")
        tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
        assert not any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.walk(tree)), name


def test_ds_report_names_versions_and_operators() -> None:
    printed = fresh(str(ENTRY / "bin" / "ds_report"))
    assert f"deepspeed {as_deepspeed.VERSION}" in printed
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
