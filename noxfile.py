"""The sessions of this repository: `nox -l` lists them, `nox -s NAME` runs one.

`python3 tools/dev.py` is the front door; it makes an environment that holds nox and calls the sessions here.
`test(<package>)` installs the dependency closure of one package and nothing else; every other session that needs
the packages shares one environment, `.nox/shared`, which is only rebuilt where sources changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
import nox.project
from nox.command import CommandFailed

ROOT = Path(__file__).resolve().parent
PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
PROJECTS = {name: nox.project.load_toml(path / "pyproject.toml") for name, path in PACKAGES.items()}
NATIVE = [name for name in PACKAGES if "scikit-build-core" in str(PROJECTS[name]["build-system"]["requires"])]
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")
CONSTRAINTS = ROOT / "constraints.txt"
SHARED = ROOT / ".nox" / "shared"
TORCH_PYTHON = (3, 11)
OLDEST_TORCH = "2.8"
TORCHES = {OLDEST_TORCH: f"torch=={OLDEST_TORCH}.*", "2.11": "torch==2.11.*", "2.15": "torch==2.15.*"}
"""The versions of torch that have a session, besides the one of `constraints.txt`."""
TORCHES |= dict.fromkeys(("newest", "pre"), f"torch>={OLDEST_TORCH}")
TORCH_SUITES = ["comm", "precision", "partition", "core", "offload", "ckpt", "launch"]
# Extras that bring an accelerator's own libraries, gigabytes of them; no session here can use them.
ACCELERATOR_EXTRAS = {"gds"}
# Extras that have a session of their own, for what they bring is large and only its tests need it.
OWN_SESSION_EXTRAS = {"ray"}
# Extras that bring what stands above a package; its own tests do without it.
UPWARD_EXTRAS = {"deepspeed"}
NOT_TESTED_EXTRAS = ACCELERATOR_EXTRAS | OWN_SESSION_EXTRAS | UPWARD_EXTRAS
ENVIRONMENT = {
    "PYTHONFAULTHANDLER": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # what the first process compiles, the hundreds after it read
}

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["check"]


# ---------------------------------------------------------------------------------------------------------------------
# What a package needs


def group(name: str) -> list[str]:
    return list(nox.project.dependency_groups(GROUPS, name))


def requirement_name(requirement: str) -> str:
    """The bare distribution name of a requirement string: `zero-ckpt[nvme]~=0.1.0` is `zero-ckpt`."""
    for index, letter in enumerate(requirement):
        if not (letter.isalnum() or letter in "-_."):
            return requirement[:index].strip()
    return requirement


def base_requirements(name: str) -> list[str]:
    """What a package requires without any extra, siblings included."""
    return list(PROJECTS[name]["project"].get("dependencies", []))


def requirements(name: str) -> list[str]:
    """Every requirement of a package with the extras that its tests can use here, siblings included."""
    extras = PROJECTS[name]["project"].get("optional-dependencies", {})
    chosen = [lines for extra, lines in extras.items() if extra not in NOT_TESTED_EXTRAS]
    return [*base_requirements(name), *(line for lines in chosen for line in lines)]


def closure(name: str) -> list[str]:
    """The package and the siblings that it reaches, extras included: what its tests may import."""
    found: list[str] = []
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        found.append(current)
        waiting += [sibling for sibling in map(requirement_name, requirements(current)) if sibling in PACKAGES]
    return sorted(found)


def third_party(names: Iterable[str]) -> list[str]:
    """What the packages and their extras require besides each other.

    On another Python than the one torch is tested with, packages that only want torch in an extra do without it.
    """
    lines = {line for name in names for line in requirements(name) if requirement_name(line) not in PACKAGES}
    must = {requirement_name(line) for name in names for line in base_requirements(name)}
    skip_torch = sys.version_info[:2] != TORCH_PYTHON and "torch" not in must
    return sorted(line for line in lines if not (skip_torch and requirement_name(line) == "torch"))


def test_requirements(names: Iterable[str]) -> list[str]:
    """The common test group and the `test` groups of the packages themselves."""
    lines = group("test")
    for name in names:
        lines += PROJECTS[name].get("dependency-groups", {}).get("test", [])
    return sorted(set(lines))


# ---------------------------------------------------------------------------------------------------------------------
# Environments


def run(session: nox.Session, *command: str, env: dict[str, str] | None = None) -> None:
    session.run(*command, external=True, env={**ENVIRONMENT, **(env or {})})


def pip_install(session: nox.Session, python: str, *args: str, constraints: Path = CONSTRAINTS) -> None:
    """Install what is not ours. Python compiles of it what it imports: the frameworks have thousands of other files."""
    run(session, python, "-m", "pip", "install", "-q", "--no-compile", "-c", str(constraints), *args)


def install_tools(
    session: nox.Session, python: str, names: Sequence[str], *more: str, constraints: Path = CONSTRAINTS
) -> None:
    """Install everything but the packages themselves; torch comes first, so that nothing else chooses its build."""
    if "torch" in map(requirement_name, third_party(names)):
        pip_install(session, python, "-r", str(constraints), constraints=constraints)
    wanted = [*group("build"), *test_requirements(names), *third_party(names), *more]
    pip_install(session, python, *wanted, constraints=constraints)


def frameworks() -> list[str]:
    """The training frameworks that the integration tests run; only where torch is tested."""
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
    """A digest of what gets installed from a package's folder; the package is installed again when it differs."""
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
    python = str(SHARED / "bin" / "python")
    stamp_path = SHARED / "installed.json"
    stamp: dict[str, str] = json.loads(stamp_path.read_text()) if stamp_path.exists() else {}
    if not stamp:
        run(session, sys.executable, "-m", "venv", "--clear", str(SHARED))
    tools = repr(
        [
            CONSTRAINTS.read_text(),
            group("lint"),
            group("build"),
            frameworks(),
            test_requirements(PACKAGES),
            *third_party(PACKAGES),
        ]
    )
    wanted = {name: fingerprint(path) for name, path in PACKAGES.items()}
    changed = [name for name in PACKAGES if stamp.get(name) != wanted[name]]
    with tempfile.TemporaryDirectory() as wheels, ThreadPoolExecutor(1) as beside:
        if stamp.get("tools") != tools:
            pip_install(session, python, *group("build"))
            building = beside.submit(build_wheels, python, changed, wheels)
            install_tools(session, python, list(PACKAGES), *group("lint"), *frameworks())
        else:
            building = beside.submit(build_wheels, python, changed, wheels)
        if not building.result():
            session.error("a package did not build; the output above says why")
        built = sorted(map(str, Path(wheels).glob("*.whl")))
        if built:
            run(session, python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", *built)
    stamp_path.write_text(json.dumps({"tools": tools, **wanted}))
    return python


def build_wheels(python: str, names: Sequence[str], folder: str) -> bool:
    """Build packages' wheels into a folder and return whether they were built. It may run while pip installs."""
    if not names:
        return True
    command = [python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--wheel-dir", folder]
    return check_aside("wheels", *command, *(str(PACKAGES[name]) for name in names))


def suites(session: nox.Session, python: str, *args: str) -> None:
    run(session, python, str(ROOT / "tools" / "suites.py"), *args)


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def attempt(session: nox.Session, *command: str, env: dict[str, str] | None = None) -> bool:
    """Run a check and say whether it passed, so that the ones after it still run."""
    try:
        run(session, *command, env=env)
    except CommandFailed:
        return False
    return True


def check_aside(name: str, *command: str, env: dict[str, str] | None = None) -> bool:
    """Run a command from any thread and return whether it passed; what it prints appears in one piece at its end."""
    environment = {**os.environ, **ENVIRONMENT, **(env or {})}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    verdict = "ok" if done.returncode == 0 else f"FAILED (exit status {done.returncode}): {' '.join(command)}"
    print(f"{done.stdout}=== {name}: {verdict}", flush=True)
    return done.returncode == 0


def lint_failures(python: str) -> list[str]:
    """Run every linter and return the names of those that complained."""
    files = [str(file) for path in PACKAGES.values() for file in sorted((path / "src").rglob("*.py"))]
    sources = os.pathsep.join(str(path / "src") for path in PACKAGES.values())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as modules:
        modules.write("\n".join(files))
        modules.flush()
        verdicts = {
            "ruff": check_aside("ruff", python, "-m", "ruff", "check", "--output-format", "concise", str(ROOT)),
            "import-linter": check_aside(
                "import-linter",
                str(Path(python).parent / "lint-imports"),
                "--no-logo",
                env={"PYTHONPATH": sources},
            ),
            "house rules": check_aside("house rules", python, str(ROOT / "tools" / "check_house.py")),
            "mypy": check_aside("mypy", python, "-m", "mypy", f"@{modules.name}"),
        }
    return [name for name, passed in verdicts.items() if not passed]


def docs_failures(python: str) -> list[str]:
    """Check the pages and return the names of the checks that complained."""
    names = ("check_docs", "torch_names")
    return [name for name in names if not check_aside(name, python, str(ROOT / "tools" / f"{name}.py"))]


@nox.session(venv_backend="none")
def check(session: nox.Session) -> None:
    """Lint, every package's tests and the integration tests, in the shared environment: `tools/dev.py test`.

    Linters and the checks of the pages run beside the tests, whose ranks also wait for each other.
    """
    python = shared(session)
    with ThreadPoolExecutor(1) as beside:
        lints = beside.submit(lint_failures, python)
        docs = beside.submit(docs_failures, python)
        tested = attempt(session, python, str(ROOT / "tools" / "suites.py"), "--all", "--", *session.posargs)
        failed = [*lints.result(), *docs.result(), *([] if tested else ["tests"])]
    if failed:
        session.error(f"not passed: {', '.join(failed)}; the output above says why")


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style (ruff), types (mypy --strict), the arrows between packages, the export lists."""
    failed = lint_failures(shared(session))
    if failed:
        session.error(f"not passed: {', '.join(failed)}; the output above says why")


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def test(session: nox.Session, package: str) -> None:
    """The tests of one package in an environment that holds its dependency closure and nothing else."""
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    names = closure(package)
    install_tools(session, python, names)
    install_packages(session, python, names)
    suites(session, python, str(PACKAGES[package]), "--", *session.posargs)


@nox.session
@nox.parametrize("version", [nox.param(name, id=name) for name in TORCHES])
def torch(session: nox.Session, version: str) -> None:
    """Run what depends on torch with another version: packages' tests, parity, the page of torch's private names.

    Each version has an environment of its own, of about 6 GB with the accelerator libraries of torch's default builds;
    ZERO_TORCH_INDEX names an index with other builds. "pre" takes pre-releases too. Packages' names after `--` choose
    their tests; the rest goes to pytest.
    """
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    chosen = [word for word in session.posargs if word in PACKAGES]
    names = chosen or [f"zero-{name}" for name in TORCH_SUITES]
    reached = sorted({reached for name in names for reached in closure(name)})
    constraints = pinned_torch(session, python, version)
    install_tools(session, python, reached, constraints=constraints)
    install_packages(session, python, reached)
    folders = [str(PACKAGES[name]) for name in names]
    if not chosen:
        run(session, python, str(ROOT / "tools" / "torch_names.py"))
        folders.append(str(ROOT / "tests-integration" / "test_parity.py"))
    suites(session, python, *folders, "--", *(word for word in session.posargs if word not in chosen))


def pinned_torch(session: nox.Session, python: str, version: str) -> Path:
    """Install torch as `TORCHES` says; return a file of constraints that names the version that came."""
    index = os.environ.get("ZERO_TORCH_INDEX")
    options = [*(["--index-url", index] if index else []), *(["--pre"] if version == "pre" else [])]
    run(session, python, "-m", "pip", "install", "-q", "--upgrade", *options, TORCHES[version])
    code = "from importlib.metadata import version; print(version('torch'))"
    found = str(session.run(python, "-c", code, external=True, silent=True)).split()[-1]
    session.log(f"torch {found}")
    constraints = Path(session.virtualenv.location) / "constraints.txt"
    constraints.write_text(f"torch=={found}\n")
    return constraints


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in NATIVE])
def sanitize(session: nox.Session, package: str) -> None:
    """A native package built with the address and undefined-behaviour sanitizers, under its own tests."""
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
    names = closure(package)
    install_tools(session, python, names)
    with tempfile.TemporaryDirectory() as build:
        build_env = {"CXXFLAGS": flags, "LDFLAGS": flags, "SKBUILD_BUILD_DIR": build, "SKBUILD_INSTALL_STRIP": "false"}
        command = [python, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--force-reinstall"]
        run(session, *command, str(PACKAGES[package]), env=build_env)
    libraries = [
        session.run("c++", f"-print-file-name={name}", external=True, silent=True)
        for name in ("libasan.so", "libstdc++.so")
    ]
    test_env = {
        "LD_PRELOAD": ":".join(str(line).strip() for line in libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    run(
        session, python, str(ROOT / "tools" / "suites.py"), str(PACKAGES[package]), "--", *session.posargs, env=test_env
    )


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """Several packages together: tests-integration/."""
    suites(session, shared(session), str(ROOT / "tests-integration"), "--", *session.posargs)


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """The long tests, marked `soak`, of every suite."""
    python = shared(session)
    if "ZERO_PYTHON" not in os.environ:
        pip_install(session, python, *group("soak"))
    suites(session, python, "--all", "--marker", "soak", "--", "-o", "timeout=0", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The tests marked `gpu`, on a machine with an accelerator. ZERO_PYTHON names an interpreter to use as it is."""
    python = shared(session)
    run(
        session,
        python,
        "-c",
        "import sys, torch; sys.exit(0 if torch.accelerator.is_available() else 'no accelerator here')",
    )
    suites(session, python, "--all", "--marker", "gpu", "--", *session.posargs)


@nox.session
def triton(session: nox.Session) -> None:
    """The Triton kernels without a GPU: in Triton's interpreter, and compiled as far as machine code."""
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    install_tools(session, python, list(PACKAGES), *group("triton"))
    install_packages(session, python, list(PACKAGES))
    file = ROOT / "tests-integration" / "test_triton.py"
    command = [python, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), str(file), *session.posargs]
    with session.chdir(session.create_tmp()):
        run(session, *command, env={"TRITON_INTERPRET": "1"})


@nox.session
def ray(session: nox.Session) -> None:
    """Ray Train with the engine, on a local cluster of two processors."""
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    install_tools(session, python, list(PACKAGES), *group("ray"))
    install_packages(session, python, list(PACKAGES))
    file = ROOT / "tests-integration" / "test_ray.py"
    command = [python, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), str(file), *session.posargs]
    with session.chdir(session.create_tmp()):
        run(session, *command)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Links between the pages resolve, the examples in them parse, and torch's private names are all listed."""
    failed = docs_failures(shared(session))
    if failed:
        session.error(f"not passed: {', '.join(failed)}; the output above says why")


# ---------------------------------------------------------------------------------------------------------------------
# What people run


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """The main job, docs/examples/demo.py: train, resume, export, sample. Arguments after `--` go to the script."""
    run(session, shared(session), str(ROOT / "docs" / "examples" / "demo.py"), *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Every benchmark beside its peers. A missing peer is an error: a ratio needs both numbers."""
    if shutil.which("fio") is None:
        session.error("fio is not installed; the I/O benchmarks measure against it (Debian: apt-get install fio)")
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    install_peers(session, python, list(PACKAGES))
    folders = [*(path / "bench" for path in PACKAGES.values()), ROOT / "bench", ROOT / "tests-integration"]
    scripts = [script for folder in folders for script in sorted(folder.glob("bench_*.py"))]
    if not scripts:
        session.error("no benchmark found: packages/*/bench/bench_*.py, bench/bench_*.py, tests-integration/bench_*.py")
    wanted = session.posargs
    selected = [script for script in scripts if not wanted or any(word in str(script) for word in wanted)]
    if not selected:
        session.error(f"no benchmark's path holds {' or '.join(wanted)}: {', '.join(s.stem for s in scripts)}")
    for script in selected:
        run(session, python, str(script), env={"DS_ACCELERATOR": "cpu"})


@nox.session
def peers(session: nox.Session) -> None:
    """The tests marked `peer`, which compare with other projects' implementations, in an environment that has them."""
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    names = list(PACKAGES)
    install_peers(session, python, names)
    suites(session, python, "--all", "--marker", "peer", "--", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all wheels, install `zero-core[nvme,deepspeed,verify]` from them alone, and import every package."""
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    pip_install(session, python, *group("build"))
    command = [python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--wheel-dir", str(dist)]
    run(session, *command, *map(str, PACKAGES.values()))
    built = sorted(path.name for path in dist.glob("*.whl"))
    if len(built) != len(PACKAGES):
        session.error(f"expected {len(PACKAGES)} wheels in dist/, got {len(built)}: {', '.join(built)}")
    with tempfile.TemporaryDirectory() as scratch:
        fresh = str(Path(scratch) / "venv" / "bin" / "python")
        run(session, sys.executable, "-m", "venv", str(Path(scratch) / "venv"))
        pip_install(session, fresh, "-r", str(CONSTRAINTS))
        needed = {line for name in PACKAGES for line in base_requirements(name)}
        pip_install(session, fresh, *sorted(line for line in needed if requirement_name(line) not in PACKAGES))
        # Everything from elsewhere is there now: with no index, the siblings can only come from dist/.
        pip_install(session, fresh, "--no-index", "--find-links", str(dist), "zero-core[nvme,deepspeed,verify]")
        run(session, fresh, "-m", "pip", "check")
        modules = [name.replace("-", "_") for name in PACKAGES]
        with session.chdir(scratch):
            run(session, fresh, "-c", f"import {', '.join(modules)}; print('imported from wheels:', {modules})")
