"""A sealed store whose folders are not all there: nothing of it is removed, and the missing folder is named."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from zero_nvme_aio import ExtentStore, errors
from zero_nvme_aio.leftovers import find, remove_store

UNIT = 64 << 10
CONTENT = bytes(range(256)) * (8 * UNIT // 256)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("first", "second", "third")]


def sealed_in(folders: list[Path], content: bytes = CONTENT) -> None:
    """Leave a sealed store in some folders; its index is in the first of them."""
    with ExtentStore(folders, stripe_bytes=UNIT) as store:
        store.write("x", content)
        store.seal()
    assert list(folders[0].glob("*.index")) and all(list(folder.glob("*.extents")) for folder in folders)


def files_in(folders: list[Path]) -> dict[Path, bytes]:
    """The files of stores in some folders, but for the locks."""
    found = (path for folder in folders if folder.exists() for path in sorted(folder.iterdir()))
    return {path: path.read_bytes() for path in found if path.suffix != ".lock"}


def holds_all(folders: list[Path]) -> None:
    with ExtentStore(folders, stripe_bytes=UNIT, resume=True, verify=True) as store:
        out = bytearray(len(CONTENT))
        store.read("x", out).wait()
        assert bytes(out) == CONTENT


def unmounted(folder: Path) -> Callable[[], None]:
    """Take a drive away that is mounted at ``folder``: its empty mount point stays. Return how to mount it again."""
    aside = folder.with_name(f"{folder.name} aside")
    folder.rename(aside)
    folder.mkdir()

    def mount() -> None:
        for left in folder.iterdir():
            left.unlink()
        folder.rmdir()
        aside.rename(folder)

    return mount


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left_out", [0, 1])
def test_fewer_paths_than_before_are_refused_and_nothing_is_removed(
    folders: list[Path], left_out: int, resume: bool
) -> None:
    sealed_in(folders)
    before = files_in(folders)
    given = [folder for number, folder in enumerate(folders) if number != left_out]
    for _ in range(2):
        missing = re.escape(f"'{folders[left_out]}', which is not among the paths")
        expected = "already holds a store" if left_out and not resume else missing
        with pytest.raises(errors.ExtentError, match=expected):
            ExtentStore(given, stripe_bytes=UNIT, resume=resume)
    assert files_in(folders) == before
    holds_all(folders)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("gone", [0, 1])
def test_an_empty_mount_point_is_not_the_folder(folders: list[Path], gone: int, resume: bool) -> None:
    sealed_in(folders)
    before = files_in(folders)
    mount = unmounted(folders[gone])
    for _ in range(2):
        missing = re.escape(f"the folder that is at '{folders[gone]}' now is not the one")
        expected = "already holds a store" if gone and not resume else missing
        with pytest.raises(errors.ExtentError, match=expected):
            ExtentStore(folders, stripe_bytes=UNIT, resume=resume)
    mount()
    assert files_in(folders) == before
    holds_all(folders)


def test_what_lies_on_the_missing_drive_alone_is_not_begun_anew(folders: list[Path]) -> None:
    with ExtentStore(folders[:2], stripe_bytes=UNIT) as store:
        store.write("x", CONTENT[:UNIT])
        (file,) = store.seal().files
    holder = folders.index(Path(file).parent)
    mount = unmounted(folders[holder])
    with pytest.raises(errors.ExtentError, match="mount"):
        ExtentStore(folders[:2], stripe_bytes=UNIT, resume=True)
    mount()
    with ExtentStore(folders[:2], stripe_bytes=UNIT, resume=True) as store:
        assert store.extents()["x"][0].path == file


@pytest.mark.parametrize("way", ["link", "relative", "dots", "moved"])
def test_a_folder_with_another_name_is_the_same(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    sealed_in(folders)
    if way == "link":
        (tmp_path / "link").symlink_to(folders[0])
        given = [tmp_path / "link", *folders[1:]]
    elif way == "relative":
        monkeypatch.chdir(folders[0])
        given = [Path("."), *folders[1:]]
    elif way == "dots":
        given = [folders[0] / ".." / "first", *folders[1:]]
    else:
        given = [folders[0].rename(tmp_path / "mounted elsewhere"), *folders[1:]]
    holds_all(given)
    holds_all(given)


def test_another_order_of_the_paths_is_refused_with_the_order(folders: list[Path]) -> None:
    sealed_in(folders)
    before = files_in(folders)
    with pytest.raises(errors.ExtentError, match="already holds a store"):
        ExtentStore(folders[::-1], stripe_bytes=UNIT)
    said = "order: " + ", ".join(f"'{folder}'" for folder in folders)
    with pytest.raises(errors.FormatError, match=re.escape(said)):
        ExtentStore([folders[1], folders[0], folders[2]], stripe_bytes=UNIT, resume=True)
    assert files_in(folders) == before
    holds_all(folders)


@pytest.mark.parametrize("current", [False, True])
def test_what_is_missing_of_a_generation_that_was_replaced_does_not_matter(folders: list[Path], current: bool) -> None:
    store = ExtentStore(folders, stripe_bytes=UNIT)
    store.write("x", bytes(len(CONTENT)))
    if current:
        store.write("y", bytes(2 * len(CONTENT)))
    old = store.seal()
    store.write("x", CONTENT)
    store.seal()
    current = any(extent.path in old.files for found in store.extents().values() for extent in found)
    store.close(remove=False)
    os.unlink(old.files[1])  # as if the generation had been removed while the drive with its index was away
    if current:
        with pytest.raises(errors.FormatError, match=re.escape(f"'{old.files[1]}' is missing")):
            ExtentStore(folders, stripe_bytes=UNIT, resume=True)
    else:
        holds_all(folders)
        holds_all(folders)
        assert not any(map(os.path.exists, old.files))


KILLED = """
import os, signal, sys
from zero_nvme_aio import ExtentStore
at, unit, *folders = sys.argv[1:]
store = ExtentStore(folders, stripe_bytes=int(unit))
store.write("x", bytes(8 * int(unit))).wait()
if at == "sealing":
    store.seal(durable=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(at: str, folders: list[Path]) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, at, str(UNIT), *map(str, folders)], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("at", ["writing", "sealing"])
def test_what_a_killed_process_had_not_sealed_is_removed_where_all_folders_are_there(
    folders: list[Path], at: str
) -> None:
    killed(at, folders)
    assert len(files_in(folders)) == 3
    with ExtentStore(folders, stripe_bytes=UNIT, resume=True):
        assert not files_in(folders)


def test_what_was_never_sealed_does_not_hold_up_a_new_store_with_fewer_paths(folders: list[Path]) -> None:
    killed("writing", folders)
    with pytest.raises(errors.ExtentError, match="is not among the paths"):
        ExtentStore(folders[1:], stripe_bytes=UNIT, resume=True)
    with ExtentStore(folders[1:], stripe_bytes=UNIT) as store:
        assert not files_in(folders[1:]) and store.former_paths() == [str(folders[0])]
        store.write("x", CONTENT)
        store.seal()
    holds_all(folders[1:])  # that folder is not a part of the store since


def test_a_store_that_was_removed_is_not_missed(folders: list[Path]) -> None:
    ExtentStore(folders).close(remove=True)
    sealed_in(folders)
    ExtentStore(folders, resume=True).close(remove=True)
    for folder in folders[1:]:
        shutil.rmtree(folder)
    with ExtentStore(folders[:1], resume=True) as store:
        assert not store.former_paths()


def test_without_its_lock_files_a_store_is_known_by_its_files(folders: list[Path]) -> None:
    sealed_in(folders)
    (folders[0] / "store.lock").unlink()
    holds_all(folders)
    (folders[1] / "store.lock").write_text("{")
    holds_all(folders)


def test_a_folder_that_was_copied_with_its_lock_is_another_one(folders: list[Path]) -> None:
    ExtentStore(folders[0]).close(remove=True)
    folders[1].mkdir()
    (folders[1] / "store.lock").write_bytes((folders[0] / "store.lock").read_bytes())
    sealed_in(folders[:2])
    with pytest.raises(errors.ExtentError, match="is not among the paths"):
        ExtentStore(folders[:1], stripe_bytes=UNIT, resume=True)
    holds_all(folders[:2])


def test_leftovers_are_not_found_in_a_sealed_store_of_which_a_folder_is_not_named(folders: list[Path]) -> None:
    sealed_in(folders)
    before = files_in(folders)
    assert find([str(folders[1])], remove=True) == [] and files_in(folders) == before
    killed("writing", [folders[0].with_name("other"), folders[2].with_name("more")])
    (found,) = find([str(folders[0].with_name("other"))], remove=True)
    assert len(found.files) == 1  # what can be written to was not sealed
    holds_all(folders)


@pytest.mark.parametrize("left_out", [0, 1])
def test_a_store_is_removed_on_purpose_where_it_is_found(folders: list[Path], left_out: int) -> None:
    sealed_in(folders)
    kept = files_in([folders[left_out]])
    given = [str(folder) for number, folder in enumerate(folders) if number != left_out]
    with ExtentStore(given[0], prefix="another") as other:
        other.write("x", CONTENT)
        assert len(remove_store(given, "store")) >= 2
    assert files_in(folders) == kept
    with ExtentStore(given) as store:
        assert store.former_paths() == [str(folders[left_out])]
        with pytest.raises(errors.ExtentError, match="in use"):
            remove_store(given, "store")


def test_two_stores_beside_each_other_do_not_miss_each_others_folders(folders: list[Path]) -> None:
    with ExtentStore(folders[:2], prefix="rank0") as one, ExtentStore(folders[1:], prefix="rank1") as two:
        for store in (one, two):
            store.write("x", CONTENT)
            store.seal()
    for prefix, own in (("rank0", folders[:2]), ("rank1", folders[1:])):
        with ExtentStore(own, prefix=prefix, resume=True) as store:
            out = bytearray(len(CONTENT))
            store.read("x", out).wait()
            assert bytes(out) == CONTENT


def test_a_folder_that_may_not_be_entered_is_missing(folders: list[Path]) -> None:
    sealed_in(folders)
    before = files_in(folders[1:])
    os.rename(folders[0], folders[0].with_name("aside"))
    with pytest.raises(errors.ExtentError, match=re.escape(f"'{folders[0]}', which is not among the paths")):
        ExtentStore(folders[1:], stripe_bytes=UNIT)
    assert files_in(folders[1:]) == before


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A folder at which another one is mounted."""
    place, drive = tmp_path / "mounted", tmp_path / "drive"
    place.mkdir()
    drive.mkdir()
    if subprocess.run(["mount", "--bind", str(drive), str(place)], capture_output=True).returncode != 0:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", str(place)], capture_output=True)


def test_nothing_is_written_to_the_mount_point_of_a_drive_that_went(folders: list[Path], mounted: Path) -> None:
    said: list[str] = []
    with ExtentStore([mounted, folders[0]], stripe_bytes=UNIT, tell=said.append) as store:
        store.write("x", CONTENT)
        store.write("y", CONTENT)
        generation = store.seal()
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)
        store.write("x", CONTENT[::-1])
        later = store.seal()
        assert {Path(file).parent for file in later.files} == {folders[0]}
        for name, content in (("x", CONTENT[::-1]), ("y", CONTENT)):
            out = bytearray(len(CONTENT))
            store.read(name, out).wait()
            assert bytes(out) == content
        generation.release()
    assert list(mounted.iterdir()) == []
    assert len(said) == 1 and f"the path '{mounted}' of a store failed" in said[0] and "unmounted?" in said[0]


def test_a_single_path_whose_drive_went_is_an_error(mounted: Path) -> None:
    with ExtentStore(mounted) as store:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)
        with pytest.raises(errors.MissingPathError, match="was its drive unmounted"):
            store.write("x", CONTENT)
    assert list(mounted.iterdir()) == []


SECOND_USER = """
import os, sys
from zero_nvme_aio import ExtentStore
os.setgid(65534)
os.setuid(65534)
ExtentStore(sys.argv[1])
"""


def test_another_users_store_is_refused_by_name(shared_folder: Path) -> None:
    ExtentStore(shared_folder).close(remove=True)
    done = subprocess.run([sys.executable, "-c", SECOND_USER, str(shared_folder)], capture_output=True, text=True)
    assert f"'store' in '{shared_folder}' is another user's store (uid 0); name a folder of your own" in done.stderr


SEALS = """
import sys
from zero_nvme_aio import ExtentStore
unit, *folders = sys.argv[1:]
with ExtentStore(folders, stripe_bytes=int(unit), resume=True) as store:
    for number in range(1, 256):
        store.write("x", bytes([number]) * (4 * int(unit)))
        store.seal(durable=number % 3 > 0)
        if number % 3:
            print(number, flush=True)
"""


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("delay", [0.0, 0.003, 0.011, 0.05])
def test_killed_at_any_instant_no_sealed_generation_is_lost_by_missing_folders(
    folders: list[Path], delay: float, gone: int
) -> None:
    command = [sys.executable, "-c", SEALS, str(UNIT), *map(str, folders[:2])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    numbers = [int(process.stdout.readline()) for _ in range(3)]
    with suppress(subprocess.TimeoutExpired):
        process.wait(delay)
    process.send_signal(signal.SIGKILL)
    numbers += [int(line) for line in process.stdout.read().split()]
    process.stdout.close()
    process.wait()
    mount = unmounted(folders[gone])
    for given in (folders[:2], [folders[1 - gone]], [folders[2], folders[1 - gone]]):
        for resume in (False, True):
            with pytest.raises(errors.ExtentError):
                ExtentStore(given, stripe_bytes=UNIT, resume=resume)
    mount()
    with ExtentStore(folders[:2], stripe_bytes=UNIT, resume=True, verify=True) as store:
        out = bytearray(4 * UNIT)
        store.read("x", out).wait()
        assert out == out[:1] * len(out) and out[0] >= max(numbers)


def test_a_store_goes_on_without_a_drive_that_died_when_its_lock_files_are_deleted(folders: list[Path]) -> None:
    died, paths = folders[0], folders[:2]
    with ExtentStore(paths, stripe_bytes=UNIT, tell=lambda _: None) as store:
        shutil.rmtree(died)
        store.write("x", CONTENT)
        store.seal()
    with pytest.raises(
        errors.ExtentError, match=re.escape(f"to do without what it holds, delete '{folders[1]}/store.lock'")
    ):
        ExtentStore(paths, stripe_bytes=UNIT, resume=True)
    (folders[1] / "store.lock").unlink()
    holds_all(paths)
    holds_all(paths)


def test_a_lock_file_that_does_not_fit_is_named(tmp_path: Path, small_disk: Path) -> None:
    with (small_disk / "ballast").open("ab", buffering=0) as file:
        for nbytes in (1 << 20, 1024, 1):
            with pytest.raises(OSError, match="No space"):
                while True:
                    file.write(bytes(nbytes))
    with pytest.raises(OSError, match=re.escape(f"'{small_disk}/store.lock'")):
        ExtentStore([tmp_path / "other", small_disk])
    ExtentStore(tmp_path / "other").close(remove=True)
