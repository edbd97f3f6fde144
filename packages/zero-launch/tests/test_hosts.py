"""Jobs on several hosts, all of them this machine: the hosts' processes are the real ones, without the ssh between."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
from conftest import Lines, marked_processes, wait_until

SHORT = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ.get('CUDA_VISIBLE_DEVICES'))"


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=1\n")
    return ["--hostfile", path, "--launcher", "local"]


def test_ranks_follow_the_host_list_and_the_filters(run, write_script, hosts):
    script = write_script(SHORT)
    done = run(*hosts, "--exclude", "a:0", script)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 2 1", "[rank 1] 1 2 0"], done.stderr
    assert "2 ranks on 2 hosts (a 1, b 1)" in done.stderr


def test_nothing_is_left_when_the_launcher_or_a_host_is_killed(start, write_script, mark, tmp_path, hosts):
    script = write_script(
        "import os, signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'], start_new_session=True);"
        "open('ready' + os.environ['RANK'], 'w'); time.sleep(120)"
    )
    job = start(*hosts, "--include", "a:0@b", "--grace", 1, script)
    assert wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 60)
    hands = [p for p in psutil.Process(job.pid).children() if "zero_launch.host" in p.cmdline()]
    assert len(hands) == 2
    hands[1].kill()
    _, err = job.communicate(timeout=30)
    assert wait_until(lambda: marked_processes(mark) == [], 10)
    assert "rank 1 of 2 failed first: host b was lost: the connection was closed" in err
    assert job.returncode == 1


@pytest.mark.soak
def test_a_signal_to_the_launcher_ends_the_job_on_every_host(start, write_script, mark, tmp_path, hosts):
    script = write_script("import os, time; open('ready' + os.environ['RANK'], 'w'); time.sleep(120)")
    job = start(*hosts, script)
    assert wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 3, 60)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=30)
    assert "interrupted by SIGINT; every process of the job has ended on every host" in err
    assert job.returncode == 130
    assert wait_until(lambda: marked_processes(mark) == [], 3)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--hostfile", "nowhere"], 2, "No such file or directory: 'nowhere'"),
        (["--hostfile", "twice"], 2, "twice:2: host 'a' is already named in line 1"),
        (["--hostfile", "none"], 2, "none:1: host 'a' offers slots=0"),
        (["--hostfile", "hosts", "-i", "c"], 2, "no host 'c' in the hostfile; it has a, b"),
        (["--hostfile", "hosts", "--num_nodes", "3"], 2, "--num_nodes 3: the hostfile leaves 2: a, b"),
        (["--hostfile", "hosts", "--num_gpus", "2"], 2, "--num_gpus 2: host 'b' has 1 slots"),
        (["--hostfile", "hosts", "--nnodes", "3:2"], 2, "--nnodes: expected N or MIN:MAX"),
        (["--hostfile", "hosts", "--nnodes", "3"], 2, "3 hosts are needed, but the host list has 2: a, b"),
        (["--hostfile", "hosts", "--direct-rank", "0"], 2, "direct_rank: on several hosts"),
        (["--hostfile", "hosts", "--forward", "NOPE"], 2, "--forward NOPE: no such variable is set here"),
        (["--no_ssh", "--nnodes", "2"], 2, "--no_ssh needs --node_rank, --master_addr"),
        (["--bind_core_list", "0-x"], 2, "expected numbers and ranges as in 0,2-5"),
        (["--bind_core_list", "99999"], 2, "this process may not use core 99999"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(run, write_script, tmp_path, arguments, status, message):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=1\n")
    (tmp_path / "twice").write_text("a slots=2\na slots=1\n")
    (tmp_path / "none").write_text("a slots=0\n")
    done = run(*arguments, write_script("pass"))
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr


@pytest.mark.soak
def test_a_port_in_use_is_named(run, write_script, hosts):
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        done = run(*hosts, "--master_port", port, write_script("pass"))
        assert done.returncode == 1
        assert f"cannot listen on 127.0.0.1 port {port} for the ranks' store" in done.stderr
        node = ["--no_ssh", "--nnodes", 2, "--node_rank", 0, "--master_addr", "127.0.0.1", "--nproc", 1]
        done = run(*node, "--master_port", port, write_script("pass"))
        assert (done.returncode, f"cannot listen on 127.0.0.1 port {port}" in done.stderr) == (2, True), done.stderr


@pytest.mark.soak
def test_nodes_that_are_started_one_by_one_find_the_first(start, write_script):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script = write_script(SHORT)
    common = ["--no_ssh", "--nnodes", 2, "--master_addr", "127.0.0.1", "--master_port", port, "--nproc", 1]
    second = start(*common, "--node_rank", 1, script)
    heard = Lines(second.stderr)
    assert heard.have(rf"waiting for node 0 at 127\.0\.0\.1:{port}", 60)
    first = start(*common, "--node_rank", 0, script)
    out, err = first.communicate(timeout=60)
    assert sorted(line[:12] for line in out.splitlines()) == ["[rank 0] 0 2", "[rank 1] 1 2"], err
    assert (first.returncode, second.wait(30)) == (0, 0)


IMPATIENT = """
    import sys
    from zero_launch import cli, roster
    roster.Roster.seconds_to_greet = float(sys.argv[1])
    sys.exit(cli.main(sys.argv[2:]))
"""


def test_a_job_begins_with_the_fewest_nodes_and_tells_one_that_comes_later_at_once(start, write_script, tmp_path):
    launcher = write_script(IMPATIENT).rename(tmp_path / "launcher.py")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["--no_ssh", "--nnodes", "1:2", "--master_addr", "127.0.0.1", "--master_port", port, "--nproc", 1]
    script = write_script("import os, time; open('begun', 'w')\nwhile not os.path.exists('enough'): time.sleep(0.1)")
    command = [sys.executable, launcher, "15", *words, "--node_rank", "0", script]
    with subprocess.Popen([str(word) for word in command], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as first:
        told = Lines(first.stderr)
        assert wait_until((tmp_path / "begun").exists, 120), told.text
        late = start(*words, "--node_rank", 1, script)
        _, err = late.communicate(timeout=90)
        assert late.returncode == 1 and "the job has begun without this node" in err, err
        assert first.poll() is None
        (tmp_path / "enough").touch()
        assert first.wait(90) == 0, told.text


def test_a_node_that_was_stopped_for_too_long_says_that_it_is_lost_and_the_job_goes_on(start, write_script, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["--no_ssh", "--nnodes", "1:2", "--master_addr", "127.0.0.1", "--master_port", port, "--nproc", 1]
    words += ["--max_restarts", 2, "--silence", 2]
    script = write_script(
        "import os, time; open('began' + os.environ['WORLD_SIZE'] + os.environ['RANK'], 'w')\n"
        "while not os.path.exists('enough'): time.sleep(0.1)"
    )
    first = start(*words, "--node_rank", 0, script)
    told = Lines(first.stderr)
    second = start(*words, "--node_rank", 1, script)
    assert wait_until(lambda: len(list(tmp_path.glob("began2?"))) == 2, 120), told.text
    stopped = [psutil.Process(second.pid), *psutil.Process(second.pid).children(recursive=True)]
    for process in stopped:
        process.suspend()
    assert wait_until((tmp_path / "began10").exists, 60), told.text
    for process in stopped:
        process.resume()
    _, err = second.communicate(timeout=60)
    assert second.returncode != 0 and "counts this node as lost" in err and "reports why" not in err, err
    (tmp_path / "enough").touch()
    assert first.wait(60) == 0, told.text


@pytest.mark.soak
def test_a_launcher_says_for_which_nodes_and_ranks_it_waits(start, write_script, hosts):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["--no_ssh", "--nnodes", 3, "--node_rank", 0, "--master_addr", "127.0.0.1", "--master_port", port]
    job = start(*words, "--nproc", 1, write_script("pass"))
    heard = Lines(job.stderr)
    assert heard.have(rf"waiting for 2 of 3 nodes at 127\.0\.0\.1:{port}: 1, 2", 60), heard.text
    job.kill()
    script = """
        import os, time, torch.distributed as dist
        time.sleep(120 if os.environ["RANK"] == "2" else 0)
        dist.init_process_group("gloo")
    """
    job = start(*hosts, write_script(script))
    heard = Lines(job.stderr)
    assert heard.have(r"waiting for 1 of 3 ranks at 127\.0\.0\.1:\d+: rank 2 has not come", 90), heard.text


@pytest.mark.soak
def test_the_doctor_finds_this_machine_well_and_a_missing_host_not(tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    command = [sys.executable, "-m", "zero_launch", "doctor", "--hostfile", "hosts", "--launcher", "local"]
    env = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(word in done.stdout for word in ("memlock", "gloo", "shared folder", "nothing here stops a job"))
    assert list(tmp_path.iterdir()) == [tmp_path / "hosts"]


def test_a_program_runs_as_it_is(run):
    done = run("--no_python", "/bin/sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert done.stdout == "[rank 0] 0 of 1\n", done.stderr


def test_bound_ranks_have_their_own_cores_and_the_pid_file_is_there_while_they_run(start, write_script, tmp_path):
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core only")
    text = "import os, time; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS']); time.sleep(0.5)"
    job = start("--save_pid", "--nproc", 2, "--bind_core_list", ",".join(map(str, cores)), write_script(text))
    path = tmp_path / f"{job.pid}.ds"
    assert wait_until(lambda: path.exists() and path.read_text() == str(job.pid), 30)
    out, err = job.communicate(timeout=30)
    assert sorted(out.splitlines()) == [f"[rank {n}] [{core}] 1" for n, core in enumerate(cores)], err
    assert not path.exists()


def test_a_restart_on_one_host_runs_all_ranks_again(run, write_script):
    script = write_script(
        "import os, sys; print(os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True);"
        "sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1') * 3)"
    )
    done = run("--nproc", 2, "--max_restarts", 1, script)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "[rank 0] 0 1" in lines and "[rank 1] 1 1" in lines and "[rank 1] 1 0" in lines
    assert "rank 1 of 2 failed first: exit status 3" in done.stderr and "restart 1 of 1" in done.stderr


def test_a_pid_file_is_not_written_through_a_link_that_somebody_left_there(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    code = (
        "import os, pathlib, sys, zero_launch\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.ds').symlink_to({str(victim)!r})\n"
        "sys.exit(zero_launch.main(['--save_pid', '--nproc', '1', '--no_python', 'true']))"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "is there already" in done.stderr, done.stderr
    assert victim.read_text() == "untouched"
