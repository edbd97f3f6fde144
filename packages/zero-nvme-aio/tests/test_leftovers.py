"""Files of killed processes are found and removed; those in use, sealed or of others stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zero_nvme_aio
from zero_nvme_aio.leftovers import find, report

KILLED = """
import os, signal, sys, zero_nvme_aio
store = zero_nvme_aio.ExtentStore(sys.argv[1:], prefix="optimizer.rank1", checksums=True)
store.declare("w", 1 << 16, "U8")
store.write("w", bytes(1 << 16)).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    made = [tmp_path / name for name in ("a", "b")]
    for folder in made:
        folder.mkdir()
    subprocess.run([sys.executable, "-c", KILLED, *map(str, made)], check=False)
    return list(map(str, made))


def test_files_of_a_killed_process_are_found_and_removed(folders):
    (found,) = find(folders)
    assert found.prefix == "optimizer.rank1" and found.nbytes > 0 and all(map(os.path.exists, found.files))
    Path(folders[0], "optimizer.rank1.g000001.notes").write_text("of somebody else")
    Path(folders[0], "other.g000001.s0.extents").write_text("a store never wrote this: it has no lock")
    assert len(report(folders, True)) == 1
    assert not any(map(os.path.exists, found.files)) and find(folders) == []
    assert Path(folders[0], "optimizer.rank1.g000001.notes").exists()
    assert Path(folders[0], "other.g000001.s0.extents").exists()


def test_a_store_in_use_stays(folders):
    with zero_nvme_aio.ExtentStore(folders, prefix="optimizer.rank1", checksums=True) as store:
        store.declare("w", 1 << 16, "U8")
        store.write("w", bytes(1 << 16)).wait()
        assert find(folders, remove=True) == []
        out = bytearray(b"x" * (1 << 16))
        store.read("w", out).wait()
        assert out == bytes(1 << 16)
