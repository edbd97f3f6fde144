"""After a power cut the newest save that had returned is there, on a real file system whose journal is replayed."""

from __future__ import annotations

import collections
import fcntl
import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs_that_save import Job, check

_SHUTDOWN, _WITHOUT_FLUSH = 0x8004587D, 2
"""FS_IOC_SHUTDOWN: from this moment on nothing more reaches the disk, neither data nor the journal."""
SIZES = (1 << 16, 1 << 20, 16 << 20)


class Disk:
    """A file system in a file, whose power can be cut."""

    def __init__(self, image: Path, place: Path) -> None:
        self.image, self.place = image, place

    def mount(self) -> None:
        self.place.mkdir(exist_ok=True)
        subprocess.run(["mount", "-o", "loop", str(self.image), str(self.place)], check=True, capture_output=True)

    def unmount(self) -> None:
        for _ in range(100):  # a process that just ended may hold it for a moment
            if subprocess.run(["umount", str(self.place)], capture_output=True).returncode == 0:
                return
            time.sleep(0.05)
        raise TimeoutError(f"{self.place} is busy")

    def cut(self) -> None:
        """Cut the power: what the disk has not got by now it never gets."""
        fd = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        finally:
            os.close(fd)


@pytest.fixture(params=["ext4", pytest.param("xfs", marks=pytest.mark.soak)])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    make = shutil.which(f"mkfs.{request.param}", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    if make is None or os.geteuid() != 0:
        pytest.skip(f"needs root and mkfs.{request.param}")
    disk = Disk(tmp_path / "image", tmp_path / "disk")
    with disk.image.open("wb") as file:
        file.truncate(512 << 20)
    subprocess.run([make, "-q", str(disk.image)], check=True)
    try:
        disk.mount()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"mounting is not allowed here: {error.stderr.decode().strip()}")
    yield disk
    if os.path.ismount(disk.place):
        disk.unmount()


def cut_once(disk: Disk, notes: Path, number: int, rng: random.Random) -> int:
    """One job and one cut; how many steps newer than the newest save that had returned is what is opened."""
    nbytes, how = SIZES[number % 3], ("now", "behind")[number // 3 % 2]
    top = disk.place / f"new{number}"
    root = top / "folders" / "run"  # the first save makes them all
    job = Job(root, disk.place / f"store{number}", notes, 1 + number % 3, nbytes, how)
    try:
        job.wait_for_first()
        time.sleep(rng.random() * 0.3)
        disk.cut()
        job.wait()  # its next save fails
    finally:
        job.kill()
    saved = job.saved()
    disk.unmount()
    disk.mount()
    step = check(root, nbytes, saved)
    shutil.rmtree(top)
    shutil.rmtree(disk.place / f"store{number}")
    return step - saved


def test_after_a_power_cut_the_newest_save_is_there(disk: Disk, tmp_path: Path) -> None:
    rng = random.Random(3)
    for number in range(4):
        cut_once(disk, tmp_path / f"notes{number}", number, rng)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_after_two_hundred_power_cuts_no_save_is_lost(disk: Disk, tmp_path: Path) -> None:
    rng = random.Random()
    newer = collections.Counter(cut_once(disk, tmp_path / f"notes{n}", n, rng) for n in range(200))
    print(f"200 power cuts: 0 saves lost, 0 wrong; steps beyond the last save that had returned: {dict(newer)}")
