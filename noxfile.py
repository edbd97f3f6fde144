"""The sessions of this repository: `nox -l` lists them, `nox -s NAME` runs one.

`python3 tools/dev.py` is the front door; it makes an environment that holds nox and calls the sessions here.
`test(<package>)` installs the dependency closure of one package and nothing else; every other session that needs
the packages shares one environment, `.nox/shared`, which is only rebuilt where sources changed. What is installed is
said in tools/package_needs.py, and how in tools/environments.py.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path += [str(Path(__file__).resolve().parent / name) for name in ("tools", "tests-integration")]
from environments import (
    check_aside,
    for_demo,
    install_packages,
    install_peers,
    install_tools,
    pip_install,
    run,
    shared,
)
from package_needs import CONSTRAINTS, NATIVE, PACKAGES, ROOT, base_requirements, closure, group, requirement_name
from pages import installed

OLDEST_TORCH = "2.8"
TORCHES = {OLDEST_TORCH: f"torch=={OLDEST_TORCH}.*", "2.11": "torch==2.11.*", "2.15": "torch==2.15.*"}
"""The versions of torch that have a session, besides the one of `constraints.txt`."""
TORCHES |= dict.fromkeys(("newest", "pre"), f"torch>={OLDEST_TORCH}")
TORCH_SUITES = ["comm", "precision", "partition", "core", "offload", "ckpt", "launch"]
FUZZ_TARGETS = ["manifest", "header", "extents", "configuration", "hostfile", "messages"]
"""As in `tests-integration/fuzz_targets.py`."""
RUNNERS = {"slurm.md": "slurm_cluster.py"}
"""Page -> the script of tests-integration that runs it, where it needs more than `pages.py`."""

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["check"]


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def suites(session: nox.Session, python: str, *args: str) -> None:
    """Run test suites with the interpreter ``python``; ``args``: those of tools/suites.py."""
    run(session, python, str(ROOT / "tools" / "suites.py"), *args)


def attempt(session: nox.Session, *command: str, env: dict[str, str] | None = None) -> bool:
    """Run a check and say whether it passed, so that the ones after it still run."""
    try:
        run(session, *command, env=env)
    except CommandFailed:
        return False
    return True


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
            "docstrings": check_aside("docstrings", python, str(ROOT / "tools" / "check_docstrings.py")),
            "command lines": check_aside("command lines", python, str(ROOT / "tools" / "command_page.py"), "--check"),
            "configuration page": check_aside(
                "configuration page", python, str(ROOT / "tools" / "config_page.py"), "--check"
            ),
            "pictures": check_aside("pictures", python, str(ROOT / "tools" / "pictures.py"), "--check"),
            "mypy": check_aside("mypy", python, "-m", "mypy", f"@{modules.name}"),
            "torch's names": check_aside("torch's names", python, str(ROOT / "tools" / "torch_names.py")),
        }
    return [name for name, passed in verdicts.items() if not passed]


def docs_failures(python: str) -> list[str]:
    """Check the text of the pages and return the names of the checks that complained; needs no package."""
    names = ("check_docs", "check_prose", "check_reference", "benchmark_page")
    tools = {
        name: [str(ROOT / "tools" / f"{name}.py"), *(["--check"] if name.endswith("_page") else [])] for name in names
    }
    return [name for name, tool in tools.items() if not check_aside(name, python, *tool)]


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
    """Style (ruff), types (mypy --strict), arrows between packages, export lists, torch's private names."""
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


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz what is read from outside with Atheris, 10^6 cases of each target; ZERO_FUZZ_CASES is another number.

    Targets' names after `--` choose some; the rest goes to libFuzzer.
    """
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    install_tools(session, python, list(PACKAGES), *group("fuzz"))
    install_packages(session, python, list(PACKAGES))
    targets = [word for word in session.posargs if word in FUZZ_TARGETS] or FUZZ_TARGETS
    options = [word for word in session.posargs if word not in FUZZ_TARGETS]
    runs = f"-runs={os.environ.get('ZERO_FUZZ_CASES', '1000000')}"
    for target in targets:
        run(session, python, str(ROOT / "tests-integration" / "fuzz_run.py"), target, runs, *options)


@nox.session
def docs(session: nox.Session) -> None:
    """Check the pages and build their site, build/site, in an environment that holds no package of this repository."""
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    pip_install(session, python, *group("docs"))
    failed = docs_failures(python)
    if not attempt(session, python, str(ROOT / "tools" / "build_site.py")):
        failed.append("build_site")
    if failed:
        session.error(f"not passed: {', '.join(failed)}; the output above says why")


# ---------------------------------------------------------------------------------------------------------------------
# What people run


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """The main job, docs/examples/demo.py: train, resume, export, sample. Arguments after `--` go to the script."""
    run(session, for_demo(session), str(ROOT / "docs" / "examples" / "demo.py"), *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Every benchmark beside its peers. A missing peer is an error: a ratio needs both numbers.

    Results are kept in build/bench-results, a file of each benchmark and of each of its tables.
    """
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
        keep = [str(ROOT / "tools" / "bench_results.py"), str(ROOT / "build" / "bench-results")]
        run(session, python, *keep, str(script), env={"DS_ACCELERATOR": "cpu"})


@nox.session
def peers(session: nox.Session) -> None:
    """The tests marked `peer`, which compare with other projects' implementations, in an environment that has them."""
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    names = list(PACKAGES)
    install_peers(session, python, names)
    suites(session, python, "--all", "--marker", "peer", "--", *session.posargs)


def build_dist(session: nox.Session) -> Path:
    """Build the wheels of all packages into dist/, which is made anew, and return it."""
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    pip_install(session, python, *group("build"))
    command = [python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--wheel-dir", str(dist)]
    run(session, *command, *map(str, PACKAGES.values()))
    built = sorted(path.name for path in dist.glob("*.whl"))
    if len(built) != len(PACKAGES):
        session.error(f"expected {len(PACKAGES)} wheels in dist/, got {len(built)}: {', '.join(built)}")
    return dist


@nox.session
def pages(session: nox.Session) -> None:
    """Run each tutorial and how-to page from its own text, in an environment with only what the page says to install.

    Words after `--` choose pages by path. Pages that install the same share an environment. The page about Slurm runs
    on a real Slurm of four nodes where its programs are installed and the user is root; elsewhere it says why not.
    """
    dist = build_dist(session)
    found = [page for folder in ("tutorials", "how-to") for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
    chosen = [page for page in found if not session.posargs or any(word in str(page) for word in session.posargs)]
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for page in chosen:
            needs = installed(page)
            if not needs:
                continue
            folder = Path(scratch) / hashlib.sha256(repr(needs).encode()).hexdigest()[:12]
            python = str(folder / "bin" / "python")
            if not folder.exists():
                run(session, sys.executable, "-m", "venv", str(folder))
                pip_install(session, python, "--find-links", str(dist), *needs)
            runner = ROOT / "tests-integration" / RUNNERS.get(page.name, "pages.py")
            if not attempt(session, python, str(runner), str(page), tempfile.mkdtemp(dir=scratch)):
                failed.append(page.name)
    if failed:
        session.error(f"not passed: {', '.join(failed)}; the output above says why")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all wheels, install `zero-core[nvme,deepspeed,verify]` from them alone, and import every package."""
    dist = build_dist(session)
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
