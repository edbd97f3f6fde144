"""The environments of sessions: installation into one of its own, the shared one and the demo's. For noxfile.py."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from package_needs import (
    CONSTRAINTS,
    PACKAGES,
    ROOT,
    TORCH_PYTHON,
    base_closure,
    base_requirements,
    group,
    requirement_name,
    test_requirements,
    third_party,
)

SHARED = ROOT / ".nox" / "shared"
DEMO = ROOT / ".nox" / "demo"
ENVIRONMENT = {
    "PYTHONFAULTHANDLER": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # what the first process compiles, the hundreds after it read
}


def run(session: nox.Session, *command: str, env: dict[str, str] | None = None) -> None:
    """Run a command in a session; ``env``: variables beyond `ENVIRONMENT`. A failed command ends the session."""
    session.run(*command, external=True, env={**ENVIRONMENT, **(env or {})})


def check_aside(name: str, *command: str, env: dict[str, str] | None = None) -> bool:
    """Run a command from any thread and return whether it passed; what it prints appears in one piece at its end."""
    environment = {**os.environ, **ENVIRONMENT, **(env or {})}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    verdict = "ok" if done.returncode == 0 else f"FAILED (exit status {done.returncode}): {' '.join(command)}"
    print(f"{done.stdout}=== {name}: {verdict}", flush=True)
    return done.returncode == 0


def pip_install(
    session: nox.Session, python: str, *args: str, constraints: Path = CONSTRAINTS, quiet: bool = True
) -> None:
    """Install packages from an index. Not compiled: Python compiles what it imports, a small part of the frameworks."""
    silence = ["-q"] if quiet else []
    run(session, python, "-m", "pip", "install", *silence, "--no-compile", "-c", str(constraints), *args)


def install_tools(
    session: nox.Session, python: str, names: Sequence[str], *more: str, constraints: Path = CONSTRAINTS
) -> None:
    """Install everything but the packages themselves; torch comes first, so that nothing else chooses its build."""
    if "torch" in map(requirement_name, third_party(names)):
        pip_install(session, python, "-r", str(constraints), constraints=constraints)
    wanted = [*group("build"), *test_requirements(names), *third_party(names), *more]
    pip_install(session, python, *wanted, constraints=constraints)
    hasten_torch(python)


def hasten_torch(python: str) -> None:
    """Have the environment's interpreters import `tools/torch_uncollected.py` when they start."""
    [folder] = Path(python).parents[1].glob("lib/python*/site-packages")
    shutil.copy(ROOT / "tools" / "torch_uncollected.py", folder)
    (folder / "torch_uncollected.pth").write_text("import torch_uncollected\n")


def frameworks() -> list[str]:
    """Return the training frameworks that the integration tests run; empty on another Python than `TORCH_PYTHON`."""
    return group("frameworks") if sys.version_info[:2] == TORCH_PYTHON else []


def install_packages(session: nox.Session, python: str, names: Sequence[str]) -> None:
    """Install local packages in one pip command: siblings are on no index, and pip must not look for them there."""
    install = [python, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps"]
    run(session, *install, *(str(PACKAGES[name]) for name in names))


def install_peers(session: nox.Session, python: str, names: Sequence[str]) -> None:
    """Install the packages beside the projects that they are compared with. A missing one is an error."""
    install_tools(session, python, names, *frameworks())
    # DeepSpeed's build imports torch, and builds no native code ahead of time.
    build_env = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    command = [python, "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), "--no-build-isolation"]
    run(session, *command, *group("bench"), env=build_env)
    run(session, python, "-c", "import deepspeed; print('peer: deepspeed', deepspeed.__version__)", env=build_env)
    install_packages(session, python, names)


def fingerprint(path: Path) -> str:
    """Return a digest of what is installed from a package's folder; `shared` installs it again if that changed."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path).parts
        if file.is_file() and not {"tests", "bench", "build", "dist", "__pycache__"} & set(inside):
            digest.update(repr(inside).encode() + file.read_bytes())
    return digest.hexdigest()


def shared(session: nox.Session) -> str:
    """Bring the shared environment up to date and return its interpreter.

    With ZERO_PYTHON set, that interpreter is used as it is: for machines where nothing can be installed.
    """
    given = os.environ.get("ZERO_PYTHON")
    if given:
        return given
    tools = [*group("lint"), *group("build"), *frameworks(), *test_requirements(PACKAGES), *third_party(PACKAGES)]
    return up_to_date(session, SHARED, list(PACKAGES), tools)


def for_demo(session: nox.Session) -> str:
    """Bring the demo's environment up to date and return its interpreter: zero-core without extras, what `sample.py`
    loads weights with, and what builds packages. ZERO_PYTHON as for `shared`.
    """
    given = os.environ.get("ZERO_PYTHON")
    if given:
        return given
    names = base_closure("zero-core")
    needed = {line for name in names for line in base_requirements(name) if requirement_name(line) not in PACKAGES}
    return up_to_date(session, DEMO, names, [*group("build"), *sorted(needed), "safetensors>=0.4"], quiet=False)


def up_to_date(
    session: nox.Session, folder: Path, names: Sequence[str], tools: Sequence[str], *, quiet: bool = True
) -> str:
    """Bring the environment in ``folder`` up to date with these packages and return its interpreter.

    ``tools``: requirements of everything besides the packages. What did not change is not installed again. Without
    ``quiet``, what is installed is shown.
    """
    python = str(folder / "bin" / "python")
    stamp_path = folder / "installed.json"
    stamp: dict[str, str] = json.loads(stamp_path.read_text()) if stamp_path.exists() else {}
    if not stamp:
        run(session, sys.executable, "-m", "venv", "--clear", str(folder))
    digest = repr([CONSTRAINTS.read_text(), *tools])
    wanted = {name: fingerprint(PACKAGES[name]) for name in names}
    changed = [name for name in names if stamp.get(name) != wanted[name]]
    with tempfile.TemporaryDirectory() as wheels, ThreadPoolExecutor(1) as beside:
        if stamp.get("tools") != digest:
            pip_install(session, python, *group("build"))
            building = beside.submit(build_wheels, python, changed, wheels)
            # torch is named with its version, so that nothing else chooses its build.
            pip_install(session, python, "-r", str(CONSTRAINTS), *tools, quiet=quiet)
        else:
            building = beside.submit(build_wheels, python, changed, wheels)
        if not building.result():
            session.error("a package did not build; the output above says why")
        built = sorted(map(str, Path(wheels).glob("*.whl")))
        if built:
            run(session, python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", *built)
    hasten_torch(python)
    stamp_path.write_text(json.dumps({"tools": digest, **wanted}))
    return python


def build_wheels(python: str, names: Sequence[str], folder: str) -> bool:
    """Build packages' wheels into a folder and return whether all were built; may run in a thread beside pip."""
    if not names:
        return True
    command = [python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--wheel-dir", folder]
    return check_aside("wheels", *command, *(str(PACKAGES[name]) for name in names))
