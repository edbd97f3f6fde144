"""Where the tests run: every backend, and three file systems (ext4 or whatever tmp_path is on, tmpfs, XFS on a loop
device).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import zero_nvme_aio as aio

BACKENDS = ("io_uring", "libaio", "threads")


@pytest.fixture(autouse=True, scope="session")
def own_tuning_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's tuning."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


def runs(backend: str) -> bool:
    return any(status.name == backend and status.available for status in aio.probe().backends)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if not runs(request.param):
        pytest.skip(next(s.reason for s in aio.probe().backends if s.name == request.param))
    return str(request.param)


def loop_mount(kind: str, image: Path, mount: Path, megabytes: int) -> None:
    """Makes and mounts a small file system; skips with the reason where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("mounting a loop device needs root")
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    mount.mkdir()
    for command in (["mkfs", "-t", kind, "-q", str(image)], ["mount", "-o", "loop", str(image), str(mount)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


def unmount(mount: Path) -> None:
    subprocess.run(["umount", str(mount)], check=True)


@pytest.fixture(scope="session")
def xfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("xfs")
    loop_mount("xfs", root / "image", root / "mount", 400)
    yield root / "mount"
    unmount(root / "mount")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    loop_mount("ext4", tmp_path / "image", tmp_path / "small", 16)
    yield tmp_path / "small"
    unmount(tmp_path / "small")


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder for all users of the host, outside of pytest's, which are for one; needs root."""
    if os.geteuid() != 0:
        pytest.skip("being two users needs root")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o1777)
        yield Path(name)


@pytest.fixture
def freezing(tmp_path: Path) -> Iterator[Path]:
    """A file system that ``fsfreeze`` can stop."""
    loop_mount("ext4", tmp_path / "freezing-image", tmp_path / "freezing", 32)
    yield tmp_path / "freezing"
    subprocess.run(["fsfreeze", "--unfreeze", str(tmp_path / "freezing")], capture_output=True)
    unmount(tmp_path / "freezing")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("first", "second")]


@pytest.fixture
def engine() -> Iterator[aio.Engine]:
    with aio.Engine() as made:
        yield made


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(params=["disk", "xfs", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on each file system in turn."""
    if request.param == "disk":
        yield tmp_path
        return
    if request.param == "xfs":
        root: Path = request.getfixturevalue("xfs")
    else:
        root = Path("/dev/shm")
        if not os.access(root, os.W_OK):
            pytest.skip("/dev/shm is not writable")
    own = root / f"zero-nvme-aio-{os.getpid()}-{tmp_path.name}"
    own.mkdir()
    yield own
    shutil.rmtree(own)
