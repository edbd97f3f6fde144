"""Names in a checkpoint cannot forge a line of the command's output, control the terminal, or end the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_ckpt import Interval, save_sharded
from zero_ckpt.cli import main

NAME = "w\nroot/t: good, 8 B\x1b[2J\x9b\u202eend"
SHOWN = "w\\nroot/t: good, 8 B\\x1b[2J\\x9b\\u202eend"


def save(root: Path, tag: str, data: bytes, name: str = NAME, **options: object) -> Path:
    return save_sharded(root, tag, [Interval(name, "param", (len(data),), "U8", 0, data)], step=1, **options)  # type: ignore[arg-type]


def test_control_characters_in_names_are_printed_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(tmp_path, "t", b"abcd", aliases={f"of {NAME}": NAME})
    save(tmp_path, "u", b"abce")
    save(tmp_path, "\x1b[2J", b"abce")
    assert main(["inspect", f"{tmp_path}@t"]) == 0
    assert main(["diff", f"{tmp_path}@t", f"{tmp_path}@u"]) == 1
    raw = bytearray((first / "rank-00000.safetensors").read_bytes())
    raw[-1] ^= 1
    (first / "rank-00000.safetensors").write_bytes(raw)
    assert main(["verify", str(tmp_path)]) == 1
    assert main(["diff", f"{tmp_path}@t", str(tmp_path / "no\nsuch")]) == 2
    assert main(["repair", "--dry-run", str(tmp_path)]) == 0
    assert main(["prune", "--dry-run", "--keep-last", "1", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert f"  {SHOWN}  [4]  param U8" in said.out and f"other values: {SHOWN}" in said.out
    assert f"{SHOWN} (param): elements" in said.out
    assert "such does not exist" in said.err
    assert all(line.startswith("zero-ckpt diff: ") for line in said.err.splitlines())
    assert not [line for line in said.out.splitlines() if line.startswith("root/t: good")]
    assert all(character.isprintable() or character == "\n" for character in said.out + said.err)


def test_a_letter_that_the_terminal_lacks_is_printed_as_an_escape(tmp_path: Path) -> None:
    save(tmp_path, "t", b"abcd", name="größe")
    command = [sys.executable, "-m", "zero_ckpt", "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"") and b"gr\\xf6\\xdfe" in done.stdout


def test_a_checkpoint_does_not_differ_from_itself_where_its_state_holds_nan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"best": float("nan"), "list": [float("nan"), {"deep": float("nan")}], "b": 1}
    save(tmp_path, "t", b"abcd", client_state=state)
    save(tmp_path, "u", b"abcd", client_state=dict(reversed(state.items())))
    save(tmp_path, "v", b"abcd", client_state={**state, "best": 1.0})
    save(tmp_path, "w", b"abcd", client_state={**state, "b": True})
    assert main(["diff", f"{tmp_path}@t", f"{tmp_path}@t"]) == 0
    assert main(["diff", f"{tmp_path}@t", f"{tmp_path}@u"]) == 0
    assert "other:" not in capsys.readouterr().out
    assert main(["diff", f"{tmp_path}@t", f"{tmp_path}@v"]) == 1
    assert main(["diff", f"{tmp_path}@t", f"{tmp_path}@w"]) == 1
    assert capsys.readouterr().out.count("other: client_state") == 2
