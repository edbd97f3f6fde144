"""Several jobs save into one root and prune it, while others read: every save is good and nobody sees half of one."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from zero_ckpt import (
    Checkpoint,
    Interval,
    ReplacedError,
    VerifyReport,
    catalog,
    open_checkpoint,
    restore,
    save_sharded,
    verify,
    verifying,
)
from zero_ckpt.cli import main
from zero_ckpt.commit import sweep
from zero_ckpt.manifest import MANIFEST_NAME
from zero_ckpt.scripts import SCRIPT_NAME, leave_script

JOB = """
import sys
from zero_ckpt import Interval, save_sharded
root, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
for step in range(count):
    save_sharded(root, f"{name}{step}", [Interval("w", "param", (8,), "U8", 0, b"abcdefgh")], step=step, keep_last=2)
"""


def run_jobs(root: Path, jobs: int, count: int) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", JOB, str(root), f"job{job}-", str(count)], stderr=subprocess.PIPE)
        for job in range(jobs)
    ]
    errors = [job.communicate(timeout=300)[1].decode() for job in running]
    assert [job.returncode for job in running] == [0] * jobs, "\n".join(errors)
    assert not any("Traceback" in error for error in errors), "\n".join(errors)
    assert open_checkpoint(root).read("w", "param") == b"abcdefgh"
    save_sharded(root, "after", [], step=count + 1, keep_last=1)
    assert sorted(path.name for path in root.iterdir()) == ["after", "latest", "zero_to_fp32.py"]


def test_two_jobs_prune_one_root(tmp_path: Path) -> None:
    run_jobs(tmp_path / "run", 2, 60)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_four_jobs_prune_one_root_for_long(tmp_path: Path) -> None:
    run_jobs(tmp_path / "run", 4, 500)
    print("4 jobs of 500 saves each into one root: 2000 saves, 0 raised")


def content(step: int) -> bytes:
    return bytes([step % 251]) * 50_000


def save(root: Path, step: int) -> None:
    data = content(step)
    parts = [Interval(name, "param", (len(data),), "U8", 0, data) for name in ("v", "w")]
    save_sharded(root, "same", parts, step=step)


@pytest.mark.parametrize("tag", [None, "same"])
def test_readers_during_a_replacement_see_one_checkpoint_or_the_other(tmp_path: Path, tag: str | None) -> None:
    save(tmp_path, 0)
    written = threading.Event()

    def replace() -> None:
        for step in range(1, 25):
            save(tmp_path, step)
        written.set()

    def fill(checkpoint: Checkpoint) -> int:
        assert checkpoint.read("v", "param") == checkpoint.read("w", "param") == content(checkpoint.step)
        return checkpoint.step

    writer = threading.Thread(target=replace)
    writer.start()
    seen = []
    try:
        while not written.is_set():
            checkpoint, step = restore(tmp_path, fill, tag)
            assert checkpoint.report.skipped == ()
            seen.append(step)
            report = verify(tmp_path / "same")
            assert report.ok, report.problems
    finally:
        writer.join()
    assert len(set(seen)) > 3 and seen == sorted(seen)


def test_a_tag_that_is_saved_again_is_there_at_every_moment(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = tmp_path / "same" / MANIFEST_NAME
    whole: list[bool] = []
    sys.setprofile(lambda *event: whole.append(manifest.exists()))
    try:
        save(tmp_path, 2)
    finally:
        sys.setprofile(None)
    assert all(whole) and len(whole) > 100
    assert open_checkpoint(tmp_path).step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "same", "zero_to_fp32.py"]


def test_a_checkpoint_that_is_gone_says_so_and_not_that_it_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoint = open_checkpoint(tmp_path)
    save(tmp_path, 2)
    with pytest.raises(ReplacedError, match=r"same was replaced or removed while it was being read; open it again"):
        checkpoint.read("w", "param")
    assert open_checkpoint(tmp_path).read("w", "param") == content(2)


def test_the_script_beside_checkpoints_is_not_swept_while_another_save_writes_it(tmp_path: Path) -> None:
    over = threading.Event()

    def sweeps() -> None:
        while not over.is_set():
            sweep(tmp_path)

    other = threading.Thread(target=sweeps)
    other.start()
    try:
        for _ in range(100):
            leave_script(tmp_path)
            (tmp_path / SCRIPT_NAME).unlink()
    finally:
        over.set()
        other.join()


def test_a_name_that_is_there_again_when_it_is_asked_for_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    real, aside, opened = catalog.Folder, tmp_path / ".replaced-same.0123456789ab", 0

    def between_two_renames(path: Path, *, follow: bool) -> catalog.Folder:
        """The first time, a save has the name; it gives it back before anybody looks again."""
        nonlocal opened
        opened += 1
        if opened > 1:
            return real(path, follow=follow)
        path.rename(aside)
        try:
            return real(path, follow=follow)
        finally:
            aside.rename(path)

    monkeypatch.setattr(catalog, "Folder", between_two_renames)
    assert verify(tmp_path / "same").ok and opened == 2
    opened = 0
    assert open_checkpoint(tmp_path, "same").step == 1 and opened == 2


def test_what_is_there_again_after_it_was_looked_for_in_vain_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)
    path, aside = tmp_path / "same", tmp_path / ".replaced-same.0123456789ab"
    verify_one = verifying.verify_candidate

    def put_back_afterwards(*place: Path, **options: Any) -> VerifyReport:
        """A save dies between two renames, and the next one puts the checkpoint back."""
        path.rename(aside)
        try:
            return verify_one(*place, **options)
        finally:
            aside.rename(path)

    monkeypatch.setattr(verifying, "verify_candidate", put_back_afterwards)
    assert main(["verify", str(tmp_path)]) == 0
    assert f"{path}: replaced or removed while it was verified" in capsys.readouterr().out
