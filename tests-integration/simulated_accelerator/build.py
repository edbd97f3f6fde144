"""Compile the device, once for its sources, this torch and this Python."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ["-O0", "-DNDEBUG", "-DAT_PER_OPERATOR_HEADERS"]
_NAME = "_simulated_accelerator"


def native() -> ModuleType:
    """Return the compiled module."""
    spec = importlib.util.spec_from_file_location(_NAME, library())
    if spec is None or spec.loader is None:
        raise ImportError(f"{library()} is no Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library() -> Path:
    """Return the path of the compiled module; compile it first where no process of this user has done so before.

    It lies in `TORCH_EXTENSIONS_DIR`, by default in the user's cache. A second process that comes meanwhile waits for
    the first one.
    """
    folder = _cache() / f"{_NAME}-{_digest()}"
    file = folder / f"{_NAME}.so"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "being-built").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                _compile(folder)
    return file


def _cache() -> Path:
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(chosen) if chosen else (Path(base) if base else Path.home() / ".cache") / "torch_extensions"


def _digest() -> str:
    digest = hashlib.sha256(repr((torch.__version__, sys.version_info[:2], _FLAGS)).encode())
    for file in sorted(_SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _compile(folder: Path) -> None:
    from torch.utils import cpp_extension

    building = folder / "build"
    shutil.rmtree(building, ignore_errors=True)  # torch would wait for ever for a build that was killed there
    building.mkdir()
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])  # has ninja
    cpp_extension.load(
        _NAME,
        str(_SOURCES / "simulated.cpp"),
        extra_cflags=_FLAGS,
        build_directory=str(building),
        is_python_module=False,
    )
    (building / f"{_NAME}.so").rename(folder / f"{_NAME}.so")
