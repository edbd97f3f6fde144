"""A conversion to a universal checkpoint dies at any step that changes a folder: the old output or the new is there."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import zero_ckpt  # noqa: E402
from zero_ckpt import convert, durable  # noqa: E402

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.link", "os.mkdir", "ctypes.dlsym")


def trained(root: Path, value: float) -> None:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    zero_ckpt.save(root, {"model": model, "optimizer": optimizer}, step=1)


def content(universal: Path) -> float:
    """The value of a whole universal checkpoint."""
    loaded = torch.load(universal / "zero" / "weight" / "fp32.pt", weights_only=True)["param"]
    assert len(list(universal.rglob("*.pt"))) == 11
    torch.load(universal / "mp_rank_00_model_states.pt", weights_only=True)
    return float(loaded[0, 0])


def die_at(number: int, body: Callable[[], Any]) -> bool:
    """Run `body` in a child that is killed before its `number`-th change of a folder after all files were written;
    whether it was killed."""
    pid = os.fork()
    if pid == 0:
        count: int | None = None

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event == "os.rename" and "mp_rank" in str(arguments[1]):
                count = 0  # the last file has its name; now the output is put in place
            if event in _CHANGES and count is not None:
                count += 1
                if count > number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.fixture(params=["exchange", "without"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the system call that exchanges two names, and as on a file system that lacks it."""
    if request.param == "without":
        monkeypatch.setattr(durable, "_NOREPLACE", 1 << 30)  # flags that the kernel does not know
        monkeypatch.setattr(durable, "_EXCHANGE", 1 << 30)
    yield request.param


def test_a_kill_while_an_output_is_replaced_loses_neither(tmp_path: Path, way: str) -> None:
    for name, value in (("old", 1.0), ("new", 2.0)):
        trained(tmp_path / name, value)
    convert(tmp_path / "old", tmp_path / "before", to="deepspeed-universal")
    for number in range(100):
        out = tmp_path / f"out{number}"
        shutil.copytree(tmp_path / "before", out)

        def replace(out: Path = out, overwrite: bool = True) -> None:
            convert(tmp_path / "new", out, to="deepspeed-universal", overwrite=overwrite, workers=1)

        killed = die_at(number, replace)
        target = out / "global_step1"
        if target.exists() or way == "exchange":
            assert content(target) in ((1.0, 2.0) if killed else (2.0,))
        with pytest.raises(zero_ckpt.CheckpointError, match="exists and is not overwritten"):
            replace(overwrite=False)
        assert content(target) in (1.0, 2.0)
        if killed and number % 5:
            continue  # what follows takes long
        replace()
        assert content(target) == 2.0
        names = {path.name for path in out.iterdir() if not path.name.startswith(".saving-latest_universal.")}
        assert names == {"global_step1", "latest_universal"}
        if not killed:
            break
    assert 10 < number < 99


def test_a_first_output_that_is_killed_can_be_started_again(tmp_path: Path) -> None:
    trained(tmp_path / "ckpt", 1.0)
    for number in range(0, 100, 2):
        out = tmp_path / f"out{number}"

        def run(out: Path = out) -> None:
            convert(tmp_path / "ckpt", out, to="deepspeed-universal", workers=1)

        killed = die_at(number, run)
        if not (out / "global_step1").exists():
            run()
        assert content(out / "global_step1") == 1.0 and (out / "latest_universal").read_text() == "global_step1"
        if not killed:
            break
    assert 3 < number < 99
