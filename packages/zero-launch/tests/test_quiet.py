"""ZERO_LOG in the environment keeps zero-launch's own lines back, as `--quiet` does."""

from __future__ import annotations

import pytest

from zero_launch.options import parser


@pytest.mark.parametrize(
    ("level", "quiet"), [("", False), ("debug", False), ("info", False), ("warning", True), ("error", True)]
)
def test_zero_log_from_warning_on_is_quiet(level: str, quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_LOG", level)
    assert parser().parse_args(["train.py"]).quiet is quiet
