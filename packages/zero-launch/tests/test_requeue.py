"""Signals that ask a job to save and end: whenever they come, however often, and whichever processes they reach."""

from __future__ import annotations

import contextlib
import os
import signal

import psutil
import pytest
from conftest import marked_processes, wait_until

from zero_launch.requeue import Requests

# A rank that knows orders as zero-core does, without a training.
POLITE = """
    import os, sys, time
    folder, rank = os.environ["ZERO_LAUNCH_ORDERS"], os.environ["RANK"]
    open(f"begun.{rank}", "w").close()
    while not os.path.exists(f"{folder}/order"):
        time.sleep(0.05)
    time.sleep(1)
    if sys.argv[1:] == ["fails"]:
        raise RuntimeError("the disk is full")
    with open(f"saved.{rank}", "a") as file:
        file.write("once")
    with open(f"{folder}/left.{rank}", "w") as file:
        file.write("end")
    sys.exit(75)
"""
RUDE = """
    import os, time
    open(f"begun.{os.environ['RANK']}", "w").close()
    time.sleep(600)
"""


# Loads the codec that the launcher reads /proc with so slowly that a signal comes in the middle of it.
SLOW_CODEC = """
import importlib.machinery, os, sys, time

class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        open(f"loads.{os.getpid()}", "w").close()
        time.sleep(2)
        super().exec_module(module)

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "encodings.ascii":
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            spec.loader = Loader(name, spec.origin)
            return spec

sys.meta_path.insert(0, Finder)
"""


def signal_all(mark: str, signum: int) -> None:
    """As Slurm does: to every process of the job, guards, shells and ranks too."""
    for process in marked_processes(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def have_begun(tmp_path, ranks):
    return lambda: len(list(tmp_path.glob("begun.*"))) == ranks


LOCAL = ("--hostfile", "hosts", "--launcher", "local")


@pytest.mark.parametrize(
    ("words", "signum"),
    [
        (("--nproc", 2), signal.SIGTERM),
        (LOCAL, signal.SIGTERM),
        pytest.param(("--nproc", 2), signal.SIGUSR1, marks=pytest.mark.soak),
        pytest.param(LOCAL, signal.SIGUSR1, marks=pytest.mark.soak),
        pytest.param((*LOCAL, "--elastic", "1:2"), signal.SIGTERM, marks=pytest.mark.soak),
    ],
)
def test_a_signal_to_every_process_that_comes_twice_has_each_rank_save_once(
    start, write_script, tmp_path, mark, words, signum
):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    job = start("--requeue", *words, write_script(POLITE))
    assert wait_until(have_begun(tmp_path, 2), 60)
    for _ in range(2):
        signal_all(mark, signum)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 75, err
    assert "a checkpoint is saved" in err and "Traceback" not in err
    assert [path.read_text() for path in sorted(tmp_path.glob("saved.*"))] == ["once", "once"]
    assert not marked_processes(mark)


def test_a_signal_that_comes_before_the_launcher_can_act_waits(start, write_script, tmp_path):
    job = start("--requeue", "--nproc", 1, write_script(POLITE))

    def holds() -> bool:
        with open(f"/proc/{job.pid}/status") as file:
            held = next(int(line.split()[1], 16) for line in file if line.startswith("SigBlk:"))
        return bool(held >> (signal.SIGTERM - 1) & 1)

    assert wait_until(holds, 60) and not (tmp_path / "begun.0").exists()
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 75, err
    assert (tmp_path / "saved.0").read_text() == "once"


def test_a_signal_may_come_in_the_middle_of_an_import_of_the_launchers(start, write_script, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SLOW_CODEC)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    job = start("--requeue", "--nproc", 1, write_script(POLITE))
    assert wait_until((tmp_path / f"loads.{job.pid}").exists, 30)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 75, err
    assert (tmp_path / "saved.0").read_text() == "once"


def test_a_job_that_fails_after_it_was_asked_to_end_says_why_and_goes_back_into_the_queue(
    start, write_script, tmp_path
):
    job = start("--requeue", "--nproc", 1, write_script(POLITE), "fails")
    assert wait_until(have_begun(tmp_path, 1), 60)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 75, err
    assert "RuntimeError: the disk is full" in err
    assert "the job ended before its ranks had saved" in err and "a checkpoint is saved" not in err


@pytest.mark.soak
@pytest.mark.parametrize("words", [("--nproc", 2), LOCAL])
def test_a_later_sigterm_ends_ranks_that_do_not_leave(start, write_script, tmp_path, mark, words):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    job = start("--requeue", *words, write_script(RUDE))
    assert wait_until(have_begun(tmp_path, 2), 60)
    signal_all(mark, signal.SIGTERM)
    with pytest.raises(Exception, match="timed out"):
        job.wait(timeout=6)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=30)
    assert job.returncode == 75, err
    assert "SIGTERM again: ended at once" in err and "the job ended before its ranks had saved" in err
    assert not marked_processes(mark)


def test_only_a_later_sigterm_is_another_request():
    now = [100.0]
    requests = Requests(lambda: now[0])
    heard = []
    for seconds, signum in [(0, signal.SIGUSR1), (1, signal.SIGTERM), (3, signal.SIGUSR1), (9, signal.SIGUSR1)]:
        now[0] = 100.0 + seconds
        heard.append(requests.hear(signum))
    now[0] = 110.0
    assert [*heard, requests.hear(signal.SIGTERM)] == ["ask", "same", "same", "same", "now"]
