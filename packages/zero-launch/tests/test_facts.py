"""What a host says of itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zero_launch.facts import _io_engine, versions
from zero_launch.roster import other_version


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("exit 3", "probe failed: exit status 3"),
        ("kill -SEGV $$", "probe failed: exit status -11"),
        ("echo first >&2; echo last >&2; exit 1", "probe failed: last"),
    ],
)
def test_a_probe_of_the_io_engine_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, told: str
) -> None:
    pytest.importorskip("zero_nvme_aio")
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{end}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    assert _io_engine() == told


def test_another_version_is_told_in_words_that_both_ends_understand():
    here = versions()
    said = f"torch is 0.1 on that host and {here['torch']} where the launcher runs; install the same"
    assert other_version({**here, "torch": "0.1"}) == said
    assert other_version(here) is None
