from __future__ import annotations

import subprocess
import sys

import pytest

from zero_launch.transport import NO_FOLDER, NO_INTERPRETER, Transport


def test_the_local_command_runs_a_module_here_with_its_arguments(tmp_path, monkeypatch):
    (tmp_path / "hand.py").write_text("import os, sys; print(os.getcwd(), sys.executable, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(Transport("local").command("a", "hand", "1", "x y"), capture_output=True, text=True)
    assert done.stdout == f"{tmp_path} {sys.executable} ['1', 'x y']\n", done.stderr


def test_a_missing_folder_and_a_missing_interpreter_have_reasons(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    command = Transport("local").command("a", "hand")
    folder.rmdir()
    assert subprocess.run(command, cwd=tmp_path).returncode == NO_FOLDER
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere" / "python"))
    command = Transport("local").command("a", "hand")
    assert subprocess.run(command).returncode == NO_INTERPRETER
    monkeypatch.chdir(tmp_path)
    assert f"no folder {tmp_path} there" in Transport().explain(NO_FOLDER)
    assert "no interpreter" in Transport().explain(NO_INTERPRETER)
    assert Transport().explain(-9) == "ssh ended with SIGKILL" and Transport().explain(3) == "ssh ended with status 3"


def test_ssh_asks_nothing_waits_briefly_and_carries_no_variable(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    command = Transport("ssh", ("-F", "config"), 2222).command("node1", "zero_launch.host")
    assert command[:3] == ["ssh", "-T", "-o"] and "BatchMode=yes" in command and "ConnectTimeout=10" in command
    assert command[-7:-1] == ["-p", "2222", "-F", "config", "--", "node1"]
    assert "secret" not in " ".join(command)


def test_pdsh_gets_its_arguments_for_ssh_by_its_own_variable(monkeypatch):
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-Fconfig")
    transport = Transport("pdsh", port=2222)
    assert transport.command("node1", "zero_launch.host", "5", "t")[:6] == ["pdsh", "-R", "ssh", "-N", "-w", "node1"]
    appended = transport.environment()["PDSH_SSH_ARGS_APPEND"]
    assert appended.endswith("-p2222 -Fconfig") and "BatchMode" in appended


def test_a_launcher_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="--launcher pdsh: no pdsh in PATH"):
        Transport("pdsh").check()
