from __future__ import annotations

import pytest

from zero_launch.environment import applied, env_files, forwarded, read_env_file

HERE = {
    "FOO": "bar",
    "NCCL_DEBUG": "INFO",
    "PATH": "/bin",
    "SSH_CONNECTION": "x",
    "RANK": "3",
    "SLURM_JOB_ID": "7",
    "HF_TOKEN": "t",
    "WANDB_API_KEY": "k",
    "BASH_FUNC_module%%": "() { :; }",
}


def test_what_the_user_set_travels_but_not_what_is_of_this_host_or_secret():
    chosen = forwarded(HERE)
    assert dict(chosen.variables) == {"FOO": "bar", "NCCL_DEBUG": "INFO"}
    assert chosen.withheld == ("HF_TOKEN", "WANDB_API_KEY")


def test_a_secret_travels_when_it_is_named_and_a_missing_name_is_an_error():
    chosen = forwarded(HERE, names=["HF_TOKEN"])
    assert chosen.variables["HF_TOKEN"] == "t" and chosen.withheld == ("WANDB_API_KEY",)
    with pytest.raises(ValueError, match="--forward NOPE: no such variable"):
        forwarded(HERE, names=["NOPE"])


def test_the_env_file_adds_and_never_overwrites(tmp_path):
    file = tmp_path / ".deepspeed_env"
    file.write_text("# for the cluster\nFOO=other\nexport BAR='a b'\n\nHF_HOME=/data\nHF_TOKEN=from-the-file\n")
    content = read_env_file(file)
    assert content == {"FOO": "other", "BAR": "a b", "HF_HOME": "/data", "HF_TOKEN": "from-the-file"}
    chosen = forwarded({"FOO": "bar"}, [content])
    assert chosen.variables == {"BAR": "a b", "FOO": "bar", "HF_HOME": "/data", "HF_TOKEN": "from-the-file"}


def test_env_files_are_looked_for_here_at_home_and_where_the_variable_says(tmp_path):
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text("")
    assert env_files({}, here, home) == [here / ".deepspeed_env", home / ".deepspeed_env"]
    other = tmp_path / "other"
    other.write_text("")
    assert env_files({"DS_ENV_FILE": str(other)}, here, home) == [other]


def test_a_bad_line_is_refused_by_number(tmp_path):
    (tmp_path / "env").write_text("A=1\nnonsense\n")
    with pytest.raises(ValueError, match=r"env:2: expected NAME=value, got 'nonsense'"):
        read_env_file(tmp_path / "env")


def test_the_other_host_keeps_what_it_has():
    assert applied({"A": "1", "B": "2", "C": "3"}, {"B": "2", "C": "other"}) == ({"A": "1"}, {"C": "other"})
