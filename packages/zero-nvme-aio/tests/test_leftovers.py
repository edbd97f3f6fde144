"""Files of killed processes are found and removed; those in use, of resumable stores or of others stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zero_nvme_aio
from zero_nvme_aio.leftovers import _try_locked, find, report

KILLED = """
import os, signal, sys, zero_nvme_aio
store = zero_nvme_aio.ExtentStore(sys.argv[1:], prefix="optimizer.rank1", checksums=True)
store.declare("w", 1 << 16, "U8")
store.write("w", bytes(1 << 16)).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""

SEALED = """
import os, signal, sys, zero_nvme_aio
prefix, link, *folders = sys.argv[1:]
store = zero_nvme_aio.ExtentStore(folders, prefix=prefix, checksums=True)
store.declare("w", 1 << 23, "U8")
store.write("w", bytes(1 << 23)).wait()
for number, path in enumerate(store.seal().files):
    os.link(path, f"{link}{number}")
store.write("w", bytes(1 << 23)).wait()
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


@pytest.mark.parametrize("prefix", ["optimizer.rank1", "parameters.rank0", "activations.rank12", "parked.rank2"])
def test_sealed_files_of_a_killed_ranks_swap_are_removed_and_the_links_of_checkpoints_stay(tmp_path, prefix):
    made = [str(tmp_path / name) for name in ("b", "a")]
    subprocess.run([sys.executable, "-c", SEALED, prefix, str(tmp_path / "link"), *made], check=False)
    (found,) = find(made)
    sealed = {name for name in map(os.path.basename, found.files) if ".g000001." in name}
    assert sealed == {f"{prefix}.g000001.{end}" for end in ("index", "s0.extents", "s1.extents")}
    alone = [path for path in found.files if os.stat(path).st_nlink == 1]
    assert found.nbytes == sum(os.stat(path).st_blocks * 512 for path in alone) > 1 << 23
    assert find(made, remove=True) == [found] and find(made) == []
    assert {name for folder in made for name in os.listdir(folder)} == {f"{prefix}.lock"}
    assert sum(path.stat().st_size for path in tmp_path.glob("link*")) >= 1 << 23


def test_sealed_files_of_a_store_that_may_be_resumed_stay(tmp_path):
    folder = str(tmp_path / "a")
    subprocess.run([sys.executable, "-c", SEALED, "mine.rank0", str(tmp_path / "link"), folder], check=False)
    (found,) = find([folder], remove=True)
    assert [os.path.basename(path) for path in found.files] == ["mine.rank0.g000002.s0.extents"]
    with zero_nvme_aio.ExtentStore([folder], prefix="mine.rank0", checksums=True, resume=True) as store:
        out = bytearray(b"x" * (1 << 23))
        store.read("w", out).wait()
    assert out == bytes(1 << 23)


def test_sealed_files_of_a_swap_in_use_stay(folders):
    with zero_nvme_aio.ExtentStore(folders, prefix="optimizer.rank1", checksums=True) as store:
        store.declare("w", 1 << 16, "U8")
        store.write("w", bytes(1 << 16)).wait()
        kept = store.seal()
        assert find(folders[::-1], remove=True) == [] and all(map(os.path.exists, kept.files))


def test_an_error_of_the_body_comes_out_as_it_is_and_the_lock_is_given_back(tmp_path):
    path = tmp_path / "optimizer.rank1.lock"
    path.touch()
    with pytest.raises(BlockingIOError, match="of the body"), _try_locked(str(path)) as ours:
        assert ours
        raise BlockingIOError("of the body")
    with _try_locked(str(path)) as ours:
        assert ours


def test_the_lock_is_given_back_though_a_process_forked_meanwhile_lives_on(tmp_path):
    path = tmp_path / "optimizer.rank1.lock"
    path.touch()
    ends, gate = os.pipe()
    with _try_locked(str(path)):
        child = os.fork()
        if child == 0:
            os.close(gate)
            os.read(ends, 1)
            os._exit(0)
    with _try_locked(str(path)) as ours:
        assert ours
    os.close(gate)
    os.close(ends)
    os.waitpid(child, 0)
