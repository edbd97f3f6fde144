"""Elastic jobs begin again: with processes that have torch imported, and not for what would happen again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import marked_processes, wait_until

from zero_launch.cli import main
from zero_launch.standby_pool import Standby, StandbyKind

STANDBY = """
    import json, os, random, sys, time
    ahead = [name for name in ("torch", "torch._dynamo", "aheadly.engine", "aheadly.rest") if name in sys.modules]
    os.environ["OMP_NUM_THREADS"] = "2"
    import torch
    os.environ["AHEADLY"] = "set before the package is imported"
    import aheadly.engine, aheadly.rest
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    print("told to standard output")
    print("told to standard error", file=sys.stderr)
    own = {name: os.environ.get(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "OMP_NUM_THREADS")}
    facts = [torch.get_num_threads(), sys.argv, __file__, sys.path[0], own, sorted(os.environ), os.getcwd()]
    facts += [aheadly.engine.VALUE, os.getsid(0) == os.getpid()]
    with open(f"part{rank}", "w") as file:
        json.dump([ahead, os.getppid(), random.random(), facts], file)
    os.rename(f"part{rank}", f"told.{attempt}.{rank}")
    while attempt == "0":
        time.sleep(0.1)
    sys.exit(3 if attempt == "1" else 0)
"""


@pytest.fixture
def aheadly(tmp_path):
    """A package of which one module may be imported ahead."""
    folder = tmp_path / "aheadly"
    folder.mkdir()
    (folder / "__init__.py").write_text("__import_ahead__ = ('aheadly.engine',)")
    (folder / "engine.py").write_text("import os\nVALUE = os.environ.get('AHEADLY')")
    (folder / "rest.py").write_text("")


@pytest.mark.usefixtures("aheadly")
def test_ranks_that_begin_again_have_torch_imported_and_are_for_their_script_fresh_ones(
    start, write_script, mark, tmp_path
):
    job = start("--elastic", "2:2", "--nproc", 2, "--restarts", 2, write_script(STANDBY), "an argument", "7")

    def standbys():
        return [process for process in marked_processes(mark) if process.name() == "zero-standby"]

    assert wait_until(lambda: len(list(tmp_path.glob("told.0.?"))) == 2, 60)

    def settled():
        """One that began before the ranks had imported everything is replaced."""
        found = standbys()
        time.sleep(0.5)
        return len(found) == 1 and found == standbys()

    assert wait_until(settled, 90)
    (ready,) = standbys()
    (victim,) = [p for p in marked_processes(mark) if p.environ().get("RANK") == "1"]
    victim.kill()
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert "rank 1 of 2 failed first: died of SIGKILL" in err and "restart 2 of 2" in err
    assert "failed first: exit status 3" in err
    numbers = set()
    for rank in range(2):
        first, *again = (json.loads((tmp_path / f"told.{attempt}.{rank}").read_text()) for attempt in range(3))
        assert [told[0] for told in (first, *again)] == [[], *2 * [["torch", "aheadly.engine"]]]
        assert [told[1] == ready.pid for told in (first, *again)] == [False, True, True]
        assert [told[3] for told in again] == 2 * [first[3]]
        assert first[3][0] == min(2, psutil.cpu_count())
        numbers |= {told[2] for told in (first, *again)}
        assert out.count(f"[rank {rank}] told to standard output\n") == 3
        assert err.count(f"[rank {rank}] told to standard error\n") == 3
    assert len(numbers) == 6  # none has another's random numbers
    assert not marked_processes(mark) and not ready.is_running()


FORKED = """
    import os, time
    import torch
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    open(f"begun.{attempt}.{os.environ['RANK']}", "w").close()
    time.sleep(600)
"""


@pytest.mark.soak
@pytest.mark.parametrize("who", ["launcher", "standby"])
def test_forked_ranks_do_not_outlive_their_launcher_or_their_standby(start, write_script, mark, tmp_path, who):
    job = start("--elastic", "2:2", "--nproc", 2, "--restarts", 2, write_script(FORKED))

    def named(name):
        return [process for process in marked_processes(mark) if process.name() == name]

    assert wait_until(lambda: len(named("zero-standby")) == 1, 90)
    (ready,) = named("zero-standby")
    (victim,) = [p for p in marked_processes(mark) if p.environ().get("RANK") == "1"]
    victim.kill()
    assert wait_until(lambda: len(list(tmp_path.glob("begun.1.?"))) == 2, 60)
    (psutil.Process(job.pid) if who == "launcher" else ready).kill()
    if who == "standby":
        assert wait_until(lambda: len(list(tmp_path.glob("begun.2.?"))) == 2, 60)
        job.terminate()
    job.communicate(timeout=30)
    assert wait_until(lambda: not marked_processes(mark), 15), marked_processes(mark)


STOPPED = """
    import os, sys, time
    import aheadly.engine
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    open(f"begun.{attempt}.{rank}", "w").close()
    if attempt == "1" and rank == sys.argv[1]:
        os.kill(os.getppid(), 19)
        sys.exit(3)
    time.sleep(600)
"""


@pytest.mark.soak
@pytest.mark.usefixtures("aheadly")
def test_ranks_whose_standby_is_stopped_end_and_begin_again_in_time(start, write_script, mark, tmp_path):
    job = start("--elastic", "2:2", "--nproc", 2, "--restarts", 2, "--grace", 1, write_script(STOPPED), 1)

    def named(name):
        return [process for process in marked_processes(mark) if process.name() == name]

    assert wait_until(lambda: len(named("zero-standby")) == 1, 60)
    (ready,) = named("zero-standby")
    (victim,) = [p for p in marked_processes(mark) if p.environ().get("RANK") == "1"]
    victim.kill()
    assert wait_until(lambda: len(list(tmp_path.glob("begun.2.?"))) == 2, 30)
    job.terminate()
    _, err = job.communicate(timeout=30)
    assert "rank 1 of 2 failed first: exit status 3" in err and "still runs" not in err, err
    assert wait_until(lambda: not marked_processes(mark), 15), marked_processes(mark)
    assert not ready.is_running()


def test_a_rank_has_the_status_that_the_kernel_tells_while_its_standby_is_stopped(write_script, tmp_path):
    script = write_script("import sys, time\ntime.sleep(float(sys.argv[1]))\nsys.exit(3)")
    for seconds, status in (("0.5", 3), ("600", -9)):
        standby = Standby(
            StandbyKind((sys.executable, "-m", "zero_launch.rank", "script", str(script), seconds), (), "[]")
        )
        try:
            rank = standby.start(0, dict(os.environ), None, None, 30)
            os.kill(standby.proc.pid, signal.SIGSTOP)
            with pytest.raises(subprocess.TimeoutExpired):
                rank.wait(0.2)
            if status < 0:
                os.kill(rank.pid, signal.SIGKILL)
            assert rank.wait(5) == rank.poll() == status
        finally:
            standby.dismiss()


def test_a_number_of_ranks_that_the_job_may_not_have_is_refused(run, write_script):
    done = run("--elastic", "2:4", "--nproc", 1, write_script("pass"))
    assert done.returncode == 2
    assert "--nproc 1: expected from 2 to 4 ranks, as --elastic says" in done.stderr


def test_a_count_of_accelerators_that_takes_too_long_is_an_error_and_no_traceback(write_script, monkeypatch, capfd):
    monkeypatch.setattr("zero_launch.devices._SECONDS", 0.01)  # an interpreter that imports torch takes longer
    assert main(["--elastic", "1:2", str(write_script("pass"))]) == 1
    said = "zero-launch: the accelerators could not be counted: torch has not answered for 0.01 s"
    assert said in capfd.readouterr().err


ALWAYS = """
    import os
    if os.environ["RANK"] == "1":
        raise KeyError("no such column")
    import time
    time.sleep(60)
"""


@pytest.mark.parametrize("hosts", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["one machine", "two hosts"])
def test_a_defect_that_ends_three_attempts_alike_ends_the_job(start, write_script, tmp_path, hosts):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    words = ["--hostfile", "hosts", "--launcher", "local"] if hosts else []
    job = start(*words, "--elastic", "1:2", "--restarts", 10, "--grace", 0.5, write_script(ALWAYS))
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "restart 2 of 10" in err and "restart 3 of 10" not in err
    assert "KeyError: 'no such column'" in err
    assert "the same failure 3 times in a row: not started again, as it would happen again (8 restart(s) left)" in err


ACCIDENT = """
    import os, sys, time
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == "1":
        time.sleep(float(sys.argv[1]))
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.soak), 1.0])
def test_a_rank_that_dies_after_those_of_another_host_have_ended_makes_all_begin_again(
    start, write_script, tmp_path, late
):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    words = ["--hostfile", "hosts", "--launcher", "local", "--elastic", "1:2", "--restarts", 1]
    job = start(*words, write_script(ACCIDENT), late)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert "rank 1 of 2 failed first: died of SIGKILL" in err and "restart 1 of 1" in err
