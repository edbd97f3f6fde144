from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from conftest import marked_processes, wait_until

from zero_launch.desync import FlightRecord, RecordedCollective
from zero_launch.record import record_failure
from zero_launch.report import LaunchError

STUBBORN = """
    import os, signal, subprocess, sys, time
    helper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
    def helpers():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", helper])
        subprocess.Popen([sys.executable, "-c", helper], start_new_session=True)
        subprocess.Popen([sys.executable, "-c", helper], env={})
    rank = int(os.environ["RANK"])
"""


def test_the_first_cause_is_on_top_with_its_traceback_not_the_broken_connection_that_followed(run, write_script):
    script = write_script(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            raise ValueError("bad batch")
        dist.all_reduce(x)
        """
    )
    done = run("--nproc", 2, script)
    assert "zero-launch: rank" in done.stderr, done
    report = done.stderr[done.stderr.index("zero-launch: rank") :]
    assert done.returncode == 1
    assert report.startswith("zero-launch: rank 1 of 2 failed first: ValueError: bad batch\n")
    assert f'File "{script}", line 7, in <module>' in report
    assert "runpy" not in report and "rank.py" not in report
    assert "logs of every rank: " in report


def test_the_exit_status_of_the_first_failing_rank_is_the_launchers(run, write_script):
    done = run(
        "--nproc", 2, write_script("import os, sys, time; time.sleep(30) if os.environ['RANK'] == '0' else sys.exit(3)")
    )
    assert done.returncode == 3
    assert "rank 1 of 2 failed first: exit status 3, without an uncaught exception" in done.stderr
    assert "rank 0 was stopped by zero-launch (SIGTERM)" in done.stderr


def test_a_script_that_ends_itself_failed_first_however_long_its_interpreter_takes_to_end(run, write_script):
    script = write_script(
        """
        import atexit, sys, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            atexit.register(lambda: (dist.destroy_process_group(), time.sleep(5)))
            sys.exit(3)
        dist.all_reduce(torch.ones(1))
        """
    )
    done = run("--nproc", 2, script)
    assert done.returncode == 3
    assert "rank 1 of 2 failed first: exit status 3, without an uncaught exception" in done.stderr


def test_death_by_signal_is_named_and_shown_as_a_shell_does(run, write_script):
    done = run(write_script("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert done.returncode == 128 + signal.SIGSEGV
    assert "died of SIGSEGV (invalid memory access in native code)" in done.stderr
    assert "| Fatal Python error: Segmentation fault" in done.stderr


def test_all_ranks_and_what_they_started_are_gone_once_one_has_died(start, write_script, mark, tmp_path):
    script = write_script(
        STUBBORN
        + """
    helpers()
    open(f"ready{rank}", "w").close()
    if rank == 1:
        while not os.path.exists("ready0"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)
    """
    )
    process = start("--nproc", 2, script)
    _, err = process.communicate(timeout=60)  # what they do takes twice as long
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 of 2 failed first: died of SIGKILL" in err
    assert "rank 0 was stopped by zero-launch (SIGKILL)" in err
    # The helpers in an empty environment carry no mark; that they are gone shows in their number having been reported.
    assert err.count("left behind: ") == 6, err
    assert marked_processes(mark) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_leaves_no_process(start, write_script, mark, tmp_path, signum):
    script = write_script(STUBBORN + "    helpers(); open(f'ready{rank}', 'w').close(); time.sleep(120)\n")
    process = start("--nproc", 2, "--grace", 1, script)
    assert wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 30)
    process.send_signal(signum)
    _, err = process.communicate(timeout=10)
    assert f"interrupted by {signum.name}" in err
    assert process.returncode == (130 if signum == signal.SIGINT else -signal.SIGTERM)
    assert marked_processes(mark) == []


def test_ranks_die_with_a_launcher_that_was_killed(start, write_script, mark, tmp_path):
    process = start("--nproc", 2, write_script("import os, time; open('r' + os.environ['RANK'], 'w'); time.sleep(120)"))
    assert wait_until(lambda: len(list(tmp_path.glob("r[01]"))) == 2, 30)
    process.kill()
    assert wait_until(lambda: marked_processes(mark) == [], 5)


def test_a_rank_that_hangs_in_its_teardown_after_an_exception_is_ended(run, write_script):
    script = write_script(
        """
        import threading, time
        threading.Thread(target=time.sleep, args=(120,)).start()
        raise RuntimeError("teardown will hang")
        """
    )
    done = run("--grace", 0.5, script)  # which waits for half as long as the thread sleeps
    assert done.returncode == 1
    assert "failed first: RuntimeError: teardown will hang" in done.stderr


def test_a_rank_that_left_early_is_mentioned_beside_the_failure_it_may_have_caused(run, write_script):
    done = run("--nproc", 2, write_script("import os, time; os.environ['RANK'] == '0' or (time.sleep(1), 1 / 0)"))
    assert "rank 1 of 2 failed first: ZeroDivisionError: division by zero" in done.stderr
    assert "rank 0 had already ended with exit status 0" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "no script 'nowhere.py' in "),
        (["--nproc", "0", "x.py"], "nproc must be at least 1, got 0"),
        (["--nproc", "two", "x.py"], "--nproc: expected a number or auto, got 'two'"),
        (["--direct-rank", "2", "--nproc", "2", "x.py"], "direct_rank must be a rank from 0 to 1, got 2"),
        (["--grace", "-1", "--nproc", "1", "x.py"], "grace_seconds must not be negative, got -1.0"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(run, arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_closed_output_ends_the_job(write_script, mark, start):
    script = write_script("import time\nwhile True: print('line'); time.sleep(0.01)")
    process = start(script)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=20) == 128 + signal.SIGPIPE
    assert "Traceback" not in process.stderr.read()
    assert marked_processes(mark) == []


def test_launching_from_a_program_leaves_its_signal_handlers_and_environment_alone(write_script):
    script = write_script("pass")
    code = (
        "import os, signal, zero_launch; before = [signal.getsignal(s) for s in (2, 15, 1, 3)], dict(os.environ); "
        f"zero_launch.launch(zero_launch.LaunchSpec({str(script)!r}, quiet=True)); "
        "print(before == ([signal.getsignal(s) for s in (2, 15, 1, 3)], dict(os.environ)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_an_ignored_hangup_stays_ignored(start, write_script, tmp_path):
    script = write_script("import time; open('ready', 'w').close(); time.sleep(2); print('survived')")
    process = start(script, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert wait_until((tmp_path / "ready").exists, 30)
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "[rank 0] survived\n"), err


def test_a_recorded_job_that_is_interrupted_leaves_word_of_it_and_no_failure(start, write_script, tmp_path):
    script = write_script("import time; print('up', flush=True); time.sleep(60)")
    process = start("--nproc", 1, "--record", "record", script)
    while "up" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    failure = json.loads((tmp_path / "record" / "failure.json").read_text())
    assert (failure["text"], failure["detail"], failure["interrupted"]) == ("interrupted by SIGINT", "", True), err


def test_a_recorded_job_that_fails_leaves_the_first_cause_in_its_record(run, write_script, tmp_path):
    script = write_script(
        """
        import os, pathlib, time
        folder = pathlib.Path(os.environ["ZERO_RUN_RECORD"])
        (folder / os.environ["RANK"]).parent.mkdir(exist_ok=True)
        if os.environ["RANK"] == "1":
            raise ValueError("bad batch")
        time.sleep(60)
        """
    )
    done = run("--nproc", 2, "--record", "record", script)
    assert done.returncode == 1, done
    failure = json.loads((tmp_path / "record" / "failure.json").read_text())
    assert failure["text"] == "rank 1 of 2 failed first: ValueError: bad batch"
    assert f'File "{script}"' in failure["detail"]


def test_the_flight_records_of_all_ranks_of_a_large_job_are_in_its_record(tmp_path):
    entries = tuple(RecordedCollective(n, n, 3, 0, "0", "gather", f"layers.{n}", "train.py:7") for n in range(1, 21))
    flight = {rank: FlightRecord(entries, 20, 19, 20) for rank in range(1024)}
    record_failure(str(tmp_path), LaunchError([], 1024, divergence="rank 1000 differs", flight=flight))
    found = json.loads((tmp_path / "failure.json").read_text())["flight"]
    assert [row["rank"] for row in found] == list(range(1024))
    assert found[1000]["waits"] == "20: gather of 'layers.20' in step 3 at train.py:7" and len(found[1000]["last"]) == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("words", [["--nproc", 2], ["--elastic", "1:2", "--nproc", 2]])
def test_a_full_disk_of_the_logs_is_named(run, write_script, tmp_path, words):
    logs = tmp_path / "logs"
    logs.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(logs)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr!r}")
    try:
        done = run(*words, "--log-dir", logs, write_script("while True: print('x' * 200, flush=True)"))
    finally:
        subprocess.run(["umount", "--lazy", str(logs)], check=True)
    assert done.returncode == 1
    assert "their disk has 0 bytes free" in done.stderr and "--log-dir" in done.stderr
