from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import marked_processes

from zero_launch.cores import threads_per_rank


def test_every_rank_runs_the_script_as_main_with_its_arguments_and_its_line_prefix(run, write_script):
    script = write_script(
        """
        import os, sys
        print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:], __name__, sys.path[0])
        """
    )
    done = run("--nproc", 2, script, "--lr", "1", "-m")
    assert done.returncode == 0, done.stderr
    expected = [f"[rank {r}] rank {r} of 2 ['--lr', '1', '-m'] __main__ {script.parent}" for r in (0, 1)]
    assert sorted(done.stdout.splitlines()) == expected


def test_a_module_runs_by_name(run, tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__init__.py").write_text("")
    (tmp_path / "job" / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    done = run("-m", "job.train", "x")
    assert done.stdout == "[rank 0] __main__ job ['x']\n", done.stderr


def test_ranks_meet_in_a_process_group_on_a_port_that_the_launcher_chose(run, write_script):
    script = write_script(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        print("total", total.item())
        dist.destroy_process_group()
        """
    )
    done = run("--nproc", 2, script)
    said = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # up to torch 2.10 it says who is there
    assert sorted(said) == ["[rank 0] total 3.0", "[rank 1] total 3.0"], done.stderr


def test_the_thread_count_is_cores_over_ranks_and_is_said(run, write_script):
    script = write_script("import os; print(os.environ['OMP_NUM_THREADS'])")
    done = run(script)
    assert done.stdout == f"[rank 0] {threads_per_rank(1)}\n"
    assert f"OMP_NUM_THREADS={threads_per_rank(1)}" in done.stderr


MAPPED = """
import resource
import torch

torch.empty(1 << 20)  # below the size of huge pages' blocks
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.zeros(64 << 20, dtype=torch.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_large_tensors_of_a_rank_are_in_huge_pages_unless_the_environment_says_otherwise(
    run, write_script, monkeypatch
):
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this system has no transparent huge pages")
    script = write_script(MAPPED)
    with_them = int(run(script).stdout.removeprefix("[rank 0] "))
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    without = int(run(script).stdout.removeprefix("[rank 0] "))
    assert with_them < without / 10


def test_output_is_shown_while_the_rank_runs(start, write_script):
    script = write_script("import time; print('begun'); time.sleep(30)")
    process = start(script)
    assert process.stdout.readline() == "[rank 0] begun\n"
    assert process.poll() is None


def test_log_files_stay_where_asked_and_temporary_ones_go(run, write_script, tmp_path):
    script = write_script("import sys; print('out'); print('err', file=sys.stderr)")
    assert run("--log-dir", tmp_path / "logs", script).returncode == 0
    (folder,) = (tmp_path / "logs").iterdir()
    assert (folder / "rank0" / "stdout.log").read_text() == "out\n"
    assert (folder / "rank0" / "stderr.log").read_text() == "err\n"
    assert run(script).returncode == 0
    assert not list(tmp_path.glob("zero-launch-*"))


def test_the_direct_rank_writes_to_the_terminal_itself(run, write_script):
    script = write_script("import os; os.write(1, f'rank {os.environ[\"RANK\"]}\\n'.encode())")  # a line at once
    done = run("--nproc", 2, "--direct-rank", 0, script)
    assert sorted(done.stdout.splitlines()) == ["[rank 1] rank 1", "rank 0"], done.stderr


def test_processes_that_a_successful_rank_leaves_behind_are_ended_and_named(run, write_script, mark):
    script = write_script(
        """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        """
    )
    done = run("--grace", 0.2, script)  # which waits for a tenth of that
    assert done.returncode == 0
    assert marked_processes(mark) == []


def test_importing_the_package_brings_no_torch_and_starts_nothing():
    code = "import sys, threading, zero_launch; print('torch' in sys.modules, threading.active_count())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False 1\n"
