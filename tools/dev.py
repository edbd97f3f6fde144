"""The front door: `python3 tools/dev.py COMMAND [-- ARGUMENTS]`.

    demo     train the example model on two ranks; arguments go to docs/examples/demo.py
    test     lint, the tests of every package, the integration tests
    lint     ruff, mypy, import-linter and the export lists
    bench    the benchmarks beside their peers (installs them); a word selects scripts by name
    NAME     any other session of noxfile.py, for example wheels, peers, soak, docs, "test(zero-ckpt)"

Standard library only. It makes `.venv` in the checkout, installs nox there and hands over; nothing is installed outside
the checkout, so it also works where pip refuses to touch the system's Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
NOX = "nox>=2024.4.15"
SESSIONS = {"test": "check"}
# The Python that every package, torch included, is tested with here; torch-free packages are tested with 3.10 to 3.13.
TESTED = (3, 11)
OLDEST = (3, 10)


def version_of(python: str) -> tuple[int, int] | None:
    """Major and minor version of an interpreter; None when it does not start (a version manager's empty stub)."""
    probe = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    major, minor = done.stdout.split()
    return int(major), int(minor)


def choose_python() -> str:
    """The interpreter for `.venv`: this one if it is 3.11, else a python3.11 on PATH, else this one with a word."""
    if sys.version_info[:2] == TESTED:
        return sys.executable
    other = shutil.which("python3.11")
    if other is not None and version_of(other) == TESTED:
        return other
    here = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info[:2] < OLDEST:
        sys.exit(f"dev.py: this is Python {here}; the packages need 3.10 or later. Install Python 3.11 and run again.")
    pin = (ROOT / "constraints.txt").read_text().split()[0]
    print(
        f"dev.py: this is Python {here} and there is no python3.11 on PATH. The pinned {pin} is tested with 3.11;\n"
        f"dev.py: if pip finds no build of it for {here} below, install Python 3.11 and its venv module and run again.",
        file=sys.stderr,
    )
    return sys.executable


def make_venv() -> Path:
    """Create `.venv` with nox in it, once, and return its interpreter."""
    python = VENV / "bin" / "python"
    ready = VENV / "nox-requirement.txt"
    if python.exists() and ready.exists() and ready.read_text() == NOX and version_of(str(python)) is not None:
        return python
    base = choose_python()
    print(f"dev.py: making {VENV.name} with {base}", file=sys.stderr)
    if base == sys.executable:
        venv.EnvBuilder(clear=True, symlinks=True).create(VENV)
    else:
        subprocess.run([base, "-m", "venv", "--clear", "--without-pip", str(VENV)], check=True)
    bootstrap = subprocess.run(
        [str(python), "-m", "ensurepip", "--upgrade"], capture_output=True, text=True, check=False
    )
    if bootstrap.returncode != 0:
        shutil.rmtree(VENV)
        sys.exit(
            f"dev.py: {base} has no ensurepip; on Debian and Ubuntu: apt-get install python3-venv\n{bootstrap.stderr}"
        )
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([str(python), "-m", "pip", "install", "-q", NOX], check=True, env=environment)
    ready.write_text(NOX)
    return python


def main() -> int:
    """Run the session that the command line names and return its exit status."""
    command, *rest = sys.argv[1:] or ["help"]
    if command in {"help", "-h", "--help"}:
        print(__doc__)
        return 0
    arguments = rest[1:] if rest[:1] == ["--"] else rest
    session = [str(make_venv()), "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", SESSIONS.get(command, command)]
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    return subprocess.run([*session, "--", *arguments], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.CalledProcessError as error:
        sys.exit(f"dev.py: {' '.join(map(str, error.cmd))} failed with exit status {error.returncode}")
