"""What breaks under a tier ends every rank with the tensor, the file and the offset; a restart continues from the last
checkpoint."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import training
from offload_runs import facts, start
from training import Run

import zero_core.offloading
from zero_comm import RanksFailedError, run_ranks

CASE = Run("plain", steps=6, dtype="bf16", clip=0.5)
SAVED = 2
HIT = 1  # the rank that the fault is on


def on_nvme(drive: Path) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(drive), "buffer_count": 3}
    return {"offload_optimizer": place, "offload_param": place}


def healthy(drive: str, folder: str) -> dict[str, bytes]:
    """All steps from the beginning, or from the last checkpoint where there is one."""
    engine = start(CASE, 3, on_nvme(Path(drive)))
    first = 0
    if any(Path(folder).glob("*")):
        engine.load_checkpoint(folder)
        first = engine.global_steps
    training.train(engine, CASE, first, CASE.steps)
    result = facts(engine)
    engine.destroy()
    return result


def struck(drive: str, folder: str, fault: str, options: dict[str, Any]) -> None:
    """Save after two steps; on rank 1 something breaks later."""
    with contextlib.ExitStack() as stack:
        if fault == "engine" and dist.get_rank() == HIT:
            stack.enter_context(faulty(**options))
        engine = start(CASE, 3, on_nvme(Path(drive)), offload={"verify": True})
        training.train(engine, CASE, 0, SAVED)
        engine.save_checkpoint(folder)
        training.train(engine, CASE, SAVED, SAVED + 1)
        if dist.get_rank() == HIT:
            spoil(Path(drive), fault)
        training.train(engine, CASE, SAVED + 1, CASE.steps)


@contextlib.contextmanager
def faulty(on: tuple[str, ...], first: int, error: int) -> Iterator[None]:
    """Files are used through an engine whose transfers fail as planned."""
    from zero_nvme_aio.testing import Fail, faulty_engine

    engines = lambda _config: faulty_engine(Fail(on=on, first=first, error=error))  # noqa: E731
    with patch.object(zero_core.offloading, "_io_engine", engines):
        yield


def spoil(drive: Path, fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault in ("flipped", "truncated"):
        path = max(drive.glob("optimizer.rank1.g*.extents"))  # of the generation that is written now
        if fault == "truncated":
            os.truncate(path, path.stat().st_size // 2)
        else:
            content = bytearray(path.read_bytes())
            for position in range(0, len(content), 4096):
                content[position] ^= 0x10
            path.write_bytes(content)


def fails_on_every_rank(drive: Path, folder: Path, fault: str, options: dict[str, Any] | None = None) -> dict[int, str]:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(struck, 2, str(drive), str(folder), fault, options or {}, timeout=60)
    failures: dict[int, str] = caught.value.failures
    assert sorted(failures) == [0, 1]
    return failures


def restarts(tmp_path: Path, folder: Path, expected: dict[str, bytes]) -> None:
    drive = tmp_path / "another drive"
    drive.mkdir(exist_ok=True)
    assert run_ranks(healthy, 2, str(drive), str(folder))[0] == expected


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    drive, folder = tmp_path_factory.mktemp("drive"), tmp_path_factory.mktemp("saved")
    result: dict[str, bytes] = run_ranks(healthy, 2, str(drive), str(folder))[0]
    return result


@pytest.mark.parametrize(
    ("fault", "options", "kind"),
    [
        ("engine", {"on": ("read",), "first": 60, "error": 5}, "ShardError"),
        pytest.param("engine", {"on": ("write",), "first": 90, "error": 28}, "StoreFullError", marks=pytest.mark.soak),
        ("flipped", None, "ShardCorruptError"),
        pytest.param("truncated", None, "ShardCorruptError", marks=pytest.mark.soak),
    ],
    ids=["a read fails", "no space", "flipped", "truncated"],
)
def test_a_fault_ends_every_rank_by_tensor_file_and_offset(
    fault: str, options: dict[str, Any] | None, kind: str, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    drive, folder = tmp_path / "drive", tmp_path / "saved"
    drive.mkdir()
    for message in fails_on_every_rank(drive, folder, fault, options).values():
        found = re.search(rf"{kind}: cannot (read|write) '([^']+)' \('([^']+)' at offset (\d+)\)", message)
        assert found is not None, message
        assert re.match(r"(blocks|embedding|norm|head)\.", found[2]), found[2]
        assert found[3].startswith(str(drive)), found[3]
    restarts(tmp_path, folder, expected)


def test_a_killed_rank_ends_the_others_and_what_it_left_is_swept(tmp_path: Path, expected: dict[str, bytes]) -> None:
    drive, folder = tmp_path / "drive", tmp_path / "saved"
    drive.mkdir()
    failures = fails_on_every_rank(drive, folder, "killed")
    assert "PeerError" in failures[0] and "without an answer" in failures[HIT]
    assert any(path.suffix != ".lock" for path in drive.iterdir())
    assert run_ranks(healthy, 2, str(drive), str(folder))[0] == expected
    assert {path.suffix for path in drive.iterdir()} <= {".lock"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize(
    ("size", "words"),
    [("8k", ["BudgetError", "short of"]), ("64k", ["StoreFullError: cannot write", "at offset", "no space is left"])],
    ids=["known before", "found while writing"],
)
def test_a_full_disk_is_named_on_every_rank(size: str, words: list[str], tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(drive)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr!r}")
    try:
        with pytest.raises(RanksFailedError) as caught:
            run_ranks(healthy, 2, str(drive), str(tmp_path / "saved"))
        for message in caught.value.failures.values():
            assert all(word in message for word in [*words, str(drive)]), message
    finally:
        subprocess.run(["umount", "--lazy", str(drive)], check=True)
