"""What a host says of itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zero_launch.facts import _io_engine


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
