"""Relative paths in a working directory that was removed: the error says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zero_ckpt
from zero_ckpt.cli import main

GONE = "the working directory no longer exists"


@pytest.fixture
def removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "gone").mkdir()
    with monkeypatch.context() as script:
        script.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        yield


@pytest.mark.parametrize(
    "call",
    [
        lambda: zero_ckpt.open_checkpoint("run"),
        lambda: zero_ckpt.convert("run", "model.safetensors"),
        lambda: zero_ckpt.save_sharded("run", "t", [], step=1),
        lambda: zero_ckpt.save_sharded("deep/run", "t", [], step=1),
    ],
    ids=["open", "convert", "save", "save deeper"],
)
def test_a_call_says_that_the_working_directory_is_gone(removed: None, call: Callable[[], object]) -> None:
    with pytest.raises(zero_ckpt.CheckpointError, match=GONE):
        call()


@pytest.mark.parametrize("words", [["inspect", "run"], ["convert", "run", "out"], ["prune", "run", "--keep-last", "1"]])
def test_a_command_says_that_the_working_directory_is_gone(
    removed: None, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert GONE in capsys.readouterr().err


def test_a_save_that_is_refused_for_it_does_not_hold_up_the_end(removed: None) -> None:
    saver = zero_ckpt.AsyncSaver()
    with pytest.raises(zero_ckpt.CheckpointError, match=GONE):
        saver.save("run", "t", [], step=1)
    saver.close()
