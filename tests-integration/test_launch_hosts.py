"""Jobs on three hosts: network namespaces of one machine, each with an sshd and an address of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import launch_hosts
import pytest
from launch_hosts import NAMES, Hosts, kill, wait_until

pytestmark = pytest.mark.soak
TRAINING = Path(__file__).with_name("_launch_training.py")
GONE_SECONDS = 10
WAIT = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.uname().nodename, os.environ.get("FOO"),
      os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
open(f"ready{os.environ['RANK']}", "w").close()
time.sleep(0 if "short" in sys.argv else 120)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    reason = launch_hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(tmp_path) as hosts:
        (tmp_path / "wait.py").write_text(WAIT)
        yield hosts


def losses(text: str) -> dict[int, str]:
    """The loss of each step as it was printed; of a step that was repeated, the last."""
    found = {}
    for line in text.splitlines():
        words = line.removeprefix("[rank 0] ").split()
        if words[:1] == ["loss"]:
            found[int(words[1])] = words[2]
    return found


def finish(job: subprocess.Popen[str], seconds: float = 240) -> tuple[str, str]:
    out, err = job.communicate(timeout=seconds)
    return out, err


def on_one_host(tmp_path: Path, *arguments: object) -> str:
    """The same training with six ranks on this machine."""
    command = [sys.executable, "-m", "zero_launch", "--nproc", "6", TRAINING, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_three_hosts_have_the_losses_of_one_and_go_on_after_a_rank_was_killed(hosts: Hosts, tmp_path: Path) -> None:
    alone = losses(on_one_host(tmp_path, 6, "-", "nothing"))
    assert sorted(alone) == list(range(6))

    job = hosts.launch("--hostfile", hosts.hostfile(), TRAINING, 6, "-", "nothing", FOO="bar")
    out, err = finish(job)
    assert job.returncode == 0, err
    assert losses(out) == alone
    assert "bar" in out

    arguments = ["--max_restarts", 1, "--hostfile", hosts.hostfile(), TRAINING, 6, tmp_path / "checkpoints", "kill"]
    job = hosts.launch(*arguments)
    out, err = finish(job)
    assert job.returncode == 0, err
    assert "rank 3 of 6 failed first: died of SIGKILL" in err and "on beta, pid" in err
    assert "restart 1 of 1" in err
    assert losses(out) == alone


def test_include_and_exclude_select_and_the_environment_comes_along(hosts: Hosts) -> None:
    job = hosts.launch("--hostfile", hosts.hostfile(), "-i", "alpha@gamma:1", "wait.py", "short", FOO="bar")
    out, err = finish(job)
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == [
        "[rank 0] rank 0 of 3 alpha bar 0,1",
        "[rank 1] rank 1 of 3 alpha bar 0,1",
        "[rank 2] rank 2 of 3 gamma bar 1",
    ]
    job = hosts.launch("--hostfile", hosts.hostfile(1), "-e", "alpha", "wait.py", "short")
    out, err = finish(job)
    assert sorted(line.split()[6] for line in out.splitlines()) == ["beta", "gamma"], err


def test_pdsh_carries_a_job_too_and_its_end_is_the_jobs(hosts: Hosts, tmp_path: Path) -> None:
    if shutil.which("pdsh") is None:
        pytest.skip("no pdsh here (Debian: pdsh)")
    job = hosts.launch("--hostfile", hosts.hostfile(1), "wait.py", launcher="pdsh", FOO="bar")
    assert wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 3, 60), finish(job, 1)
    time.sleep(1)  # for the lines to arrive
    begin = time.monotonic()
    job.kill()
    assert wait_until(hosts.all_gone, GONE_SECONDS), [hosts.processes(name) for name in NAMES]
    out, _ = finish(job, 10)
    assert sorted(line.split()[6:8] for line in out.splitlines()) == [[name, "bar"] for name in NAMES]
    print(f"pdsh: {time.monotonic() - begin:.1f} s")


@pytest.mark.parametrize(
    "accident", ["link down", "rank killed", "launcher killed", "ssh lost", "hand killed", "SIGINT"]
)
def test_after_an_accident_everything_is_gone_everywhere_within_ten_seconds(
    hosts: Hosts, tmp_path: Path, accident: str
) -> None:
    job = hosts.launch("--hostfile", hosts.hostfile(1), "wait.py", "stubborn")
    assert wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 3, 60), finish(job, 1)
    ranks = [p for p in hosts.processes("beta") if "zero_launch.rank" in p.cmdline()]
    hands = [p for p in hosts.processes("beta") if "zero_launch.host" in p.cmdline()]
    assert len(ranks) == len(hands) == 1
    accidents = {
        "link down": lambda: hosts.unplug("beta"),
        "rank killed": lambda: kill(ranks[0]),
        "launcher killed": job.kill,
        "ssh lost": lambda: kill(hosts.ssh_clients()["beta"]),
        "hand killed": lambda: kill(hands[0]),
        "SIGINT": lambda: job.send_signal(2),
    }
    begin = time.monotonic()
    accidents[accident]()
    gone = wait_until(hosts.all_gone, 30)
    seconds = time.monotonic() - begin
    left = [(name, [p.cmdline() for p in hosts.processes(name)]) for name in NAMES]
    _, err = finish(job, 30)
    print(f"{accident}: {seconds:.1f} s\n{err}")
    assert gone and seconds < GONE_SECONDS, (seconds, left)
    assert job.returncode != 0
    if accident in ("link down", "ssh lost", "hand killed"):
        assert "rank 1 of 3 failed first: host beta was lost" in err
    elif accident == "rank killed":
        assert "rank 1 of 3 failed first: died of SIGKILL" in err and "on beta, pid" in err
        assert job.returncode == 137


def test_two_of_three_hosts_go_on_when_one_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    arguments = [
        "--nnodes",
        "2:3",
        "--max_restarts",
        1,
        "--hostfile",
        hosts.hostfile(1),
        TRAINING,
        40,
        folder,
        "nothing",
    ]
    job = hosts.launch(*arguments)
    assert wait_until((folder / "latest").exists, 120), finish(job, 1)
    hosts.unplug("beta")
    out, err = finish(job)
    assert job.returncode == 0, err
    assert "host beta was lost" in err and "restart 1 of 1" in err
    assert sorted(losses(out)) == list(range(40))
    assert wait_until(lambda: not hosts.processes("beta"), GONE_SECONDS)


@pytest.mark.parametrize(
    ("case", "status", "message"),
    [
        ("unreachable", 1, "host beta: ssh could not connect"),
        ("unknown", 1, "host delta: ssh could not connect"),
        ("script", 2, "no script 'nowhere.py'"),
        ("code 3", 3, "rank 1 of 3 failed first: exit status 3, without an uncaught exception"),
    ],
)
def test_bad_input_is_refused_with_a_reason(hosts: Hosts, tmp_path: Path, case: str, status: int, message: str) -> None:
    hostfile, script = hosts.hostfile(1), "wait.py"
    if case == "unreachable":
        hosts.unplug("beta")
    elif case == "unknown":
        hostfile.write_text("alpha slots=1\ndelta slots=1\n")
    elif case == "script":
        script = "nowhere.py"
    else:
        script = "three.py"
        (tmp_path / script).write_text(
            "import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
        )
    begin = time.monotonic()
    job = hosts.launch("--hostfile", hostfile, script)
    _, err = finish(job, 60)
    print(f"{case}: {time.monotonic() - begin:.1f} s\n{err}")
    assert (job.returncode, message in err) == (status, True), err
    assert wait_until(hosts.all_gone, GONE_SECONDS)


MEET = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.new_group(list(range(dist.get_world_size())))
dist.all_reduce(torch.ones(1))
open(f"ready{os.environ['RANK']}", "w").close()
while not os.path.exists("enough"):
    time.sleep(0.1)
"""
ADDRESSES = {"alpha": "10.77.0.1", "beta": "10.77.0.2", "gamma": "10.77.0.3"}


@pytest.mark.parametrize("kind", ["ssh", "elastic", "no_ssh", "elastic no_ssh"])
def test_a_job_on_several_hosts_listens_on_the_address_that_the_hosts_use_alone(
    hosts: Hosts, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "meet.py").write_text(MEET)
    elastic = ["--elastic", "1:3", "--restarts", 1] if "elastic" in kind else []
    if "no_ssh" in kind:
        jobs = [
            hosts.node(
                *(name, "--no_ssh", "--nnodes", 3, "--node_rank", number, "--master_addr", ADDRESSES["alpha"]),
                *(*elastic, "--nproc", 1, "meet.py"),
                ZERO_LAUNCH_TOKEN="a token that nobody guesses",
            )
            for number, name in enumerate(NAMES)
        ]
    else:
        jobs = [hosts.launch(*elastic, "--hostfile", hosts.hostfile(1), "meet.py")]
    assert wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 3, 120), (jobs[0].poll(), list(tmp_path.iterdir()))
    found = {name: hosts.listening(name) for name in (*NAMES, "front")}
    (tmp_path / "enough").touch()
    ended = [job.wait(60) for job in jobs]
    assert found.pop("front") == set()  # the launcher itself listens on nothing
    assert found["alpha"] == {ADDRESSES["alpha"]}
    assert all(addresses <= {ADDRESSES[name]} for name, addresses in found.items()), found
    assert ended == [0] * len(jobs)


def test_the_doctor_shows_every_host(hosts: Hosts, tmp_path: Path) -> None:
    command = ["ip", "netns", "exec", hosts.front, sys.executable, "-m", "zero_launch", "doctor"]
    command += ["--hostfile", str(hosts.hostfile(1)), "--launcher_args", f"-F {tmp_path}/ssh_config"]
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "timeout": 120}
    options["env"] = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    words = ("10.77.0.1", "10.77.0.3", "gloo", "shared folder", "nothing here stops")
    assert all(word in done.stdout for word in words), done.stdout
    hosts.unplug("gamma")
    done = subprocess.run(command, **options)  # type: ignore[call-overload]
    assert done.returncode == 1 and "problem gamma: ssh could not connect" in done.stdout, done.stdout
