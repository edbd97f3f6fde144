"""Ranks and launchers import torch without the garbage collector, and what it leaves is out of its sight."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import ModuleType

import pytest

from zero_launch.torch_import import keep_from_collector

RANK = """
    import gc, weakref
    before, collections = gc.get_freeze_count(), sum(each["collections"] for each in gc.get_stats())
    import torch
    assert before == 0 and gc.get_freeze_count() > 100_000
    assert sum(each["collections"] for each in gc.get_stats()) - collections < 10
    assert gc.isenabled()
    assert type(torch.__spec__.loader).__name__ == "SourceFileLoader" and torch.__spec__.loader is torch.__loader__

    class Circle:
        pass

    circle = Circle()
    circle.itself, gone = circle, weakref.ref(circle)
    del circle
    gc.collect()
    assert gone() is None
"""


def test_a_rank_imports_torch_without_the_collector_which_goes_on_afterwards(write_script, monkeypatch):
    monkeypatch.delenv("ZERO_TORCH_UNCOLLECTED", raising=False)  # which has every interpreter of the suites do so
    command = [sys.executable, "-m", "zero_launch.rank", "script", str(write_script(RANK))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def finder(monkeypatch):
    """The finder of this process; torch counts as not imported."""
    before = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", before.copy())
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    keep_from_collector()
    (added,) = (each for each in sys.meta_path if each not in before)
    return added


def test_an_import_that_fails_leaves_the_collector_on_and_nothing_frozen(finder, tmp_path):
    text = "import gc\nassert not gc.isenabled()\nraise ImportError('a library is missing')"
    (tmp_path / "torch.py").write_text(text)
    spec = finder.find_spec("torch", [str(tmp_path)])
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError, match="a library is missing"):
        spec.loader.exec_module(ModuleType("torch"))
    assert gc.isenabled() and gc.get_freeze_count() == frozen


def test_a_collector_that_was_off_stays_off_and_nothing_else_is_found(finder, tmp_path):
    (tmp_path / "torch.py").write_text("")
    spec = finder.find_spec("torch", [str(tmp_path)])
    gc.disable()
    try:
        spec.loader.exec_module(ModuleType("torch"))
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
    assert finder.find_spec("json", None) is None and finder.find_spec("torch", [str(tmp_path / "nowhere")]) is None
