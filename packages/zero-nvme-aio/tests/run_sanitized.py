"""Builds the native code with sanitizers and runs it.

    python tests/run_sanitized.py address    # the native test program, then the Python tests on a sanitized extension
    python tests/run_sanitized.py thread     # the native test program

Needs a C++ compiler with libasan, libubsan and libtsan, CMake and Ninja. Builds in a temporary folder; the Python part
installs the sanitized extension into a temporary folder too, and leaves the environment alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def native(kind: str, folder: str) -> None:
    """The test program that needs no Python."""
    environment = {**os.environ, "ZERO_SANITIZE": kind}
    build = str(Path(folder) / "build-native")
    configure = ["cmake", "-S", str(ROOT), "-B", build, "-G", "Ninja", "-DZERO_NATIVE_TESTS=ON"]
    subprocess.run(configure, check=True, env=environment, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", build], check=True, env=environment, stdout=subprocess.DEVNULL)
    options = {
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    subprocess.run([str(Path(build) / "native_tests"), folder], check=True, env={**os.environ, **options})


def python(folder: str, arguments: list[str]) -> None:
    """The Python tests on an extension built with the address and undefined-behaviour sanitizers."""
    target, environment = str(Path(folder) / "site"), {**os.environ, "ZERO_SANITIZE": "address"}
    environment |= {"SKBUILD_BUILD_DIR": str(Path(folder) / "build"), "SKBUILD_INSTALL_STRIP": "false"}
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--target", target]
    subprocess.run([*install, str(ROOT)], check=True, env=environment)
    libraries = [
        subprocess.run(["c++", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    options = {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": target,
    }
    check = "import sys, zero_nvme_aio._native as n; sys.exit(0 if n.__file__.startswith(sys.argv[1]) else 1)"
    found = subprocess.run([sys.executable, "-c", check, target], env={**os.environ, **options})
    if found.returncode != 0:
        sys.exit("an editable install hides the sanitized one; run `pip uninstall zero-nvme-aio` first")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests"), *arguments]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, **options})


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in ("address", "thread"):
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            native(sys.argv[1], folder)
            if sys.argv[1] == "address":
                python(folder, sys.argv[2:])
        except subprocess.CalledProcessError as error:
            return error.returncode or 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
