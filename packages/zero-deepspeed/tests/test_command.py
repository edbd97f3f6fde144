"""The command `deepspeed`: which words it hands to zero-launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_deepspeed.command import main

SCRIPT = """
import os, sys
print("ran", os.environ["RANK"], os.environ["WORLD_SIZE"], sorted(set(sys.argv[1:]) - {"--"}))
"""


@pytest.mark.parametrize("words", [["--", "train.py"], ["train.py", "--"], ["--module", "--", "train"]], ids=" ".join)
def test_two_dashes_may_stand_before_or_after_the_script(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert main(["--nproc", "2", *words, "-m"]) == 0
    lines = sorted(line.partition("ran ")[2] for line in capfd.readouterr().out.splitlines() if "ran " in line)
    assert lines == [f"{rank} 2 ['--local_rank={rank}', '-m']" for rank in range(2)]
