"""Limits are read from wherever they are set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_offload.limits import Limit, disk_limit, locked_limits, memory_limits

MEMINFO = "MemTotal: 16384 kB\nMemAvailable: 8192 kB\n"
V1_STAT = "cache 5\ninactive_file 1\ntotal_inactive_file 2000\n"
CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def system(root: Path, *, own: str, mounts: str, files: dict[str, str]) -> Path:
    files = {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, "proc/meminfo": MEMINFO, **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cgroup_limits(root: Path) -> dict[str, int]:
    found = {limit.source: limit.free for limit in memory_limits(root)}
    return {source.rpartition("/")[2]: free for source, free in found.items() if source.startswith("cgroup")}


def test_every_v2_group_above_the_process_counts_and_page_cache_does_not(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        own="0::/jobs/one\n",
        mounts="41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n",
        files={
            "sys/fs/cgroup/jobs/memory.max": "10000\n",
            "sys/fs/cgroup/jobs/memory.high": "9000\n",
            "sys/fs/cgroup/jobs/memory.current": "4000\n",
            "sys/fs/cgroup/jobs/memory.stat": "anon 7\ninactive_file 1500\n",
            "sys/fs/cgroup/jobs/one/memory.max": "max\n",
            "sys/fs/cgroup/jobs/one/memory.high": "max\n",
            "sys/fs/cgroup/jobs/one/memory.current": "10\n",
        },
    )
    assert cgroup_limits(root) == {"jobs": 9000 - 2500}


def test_v1_limits_are_read_and_unlimited_groups_are_none(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        own="9:name=systemd:/\n4:memory:/jobs/one\n0::/\n",
        mounts="35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n",
        files={
            "sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes": "50000\n",
            "sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes": "12000\n",
            "sys/fs/cgroup/memory/jobs/one/memory.stat": V1_STAT,
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": "12000\n",
        },
    )
    assert cgroup_limits(root) == {"one": 40000}


def test_a_container_that_sees_only_its_own_part_of_the_hierarchy_finds_its_limit(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        own="4:memory:/docker/abc\n",
        mounts="35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n",
        files={
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
        },
    )
    assert cgroup_limits(root) == {"memory": 6000}


def test_names_of_groups_and_mount_points_may_have_spaces(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        own="4:memory:/user jobs/one two\n0::/app.slice/my app\n",
        mounts=(
            "41 31 0:38 / /mnt/c\\040groups rw,relatime - cgroup2 cgroup2 rw\n"
            "35 31 0:32 / /mnt/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
        ),
        files={
            "mnt/c groups/app.slice/my app/memory.max": "10000\n",
            "mnt/c groups/app.slice/my app/memory.current": "4000\n",
            "mnt/memory/user jobs/one two/memory.limit_in_bytes": "50000\n",
            "mnt/memory/user jobs/one two/memory.usage_in_bytes": "12000\n",
        },
    )
    assert cgroup_limits(root) == {"my app": 6000, "one two": 38000}


def test_memory_that_the_kernel_calls_available_is_a_limit(tmp_path: Path) -> None:
    root = system(tmp_path, own="", mounts="", files={})
    assert memory_limits(root)[0] == Limit("MemAvailable", 8192 * 1024)


def test_locked_memory_is_limited_only_where_the_process_may_not_ignore_the_limit(tmp_path: Path) -> None:
    root = system(tmp_path, own="", mounts="", files={"proc/self/status": "VmLck:\t 4 kB\nCapEff:\t0000000000000000\n"})
    program = "\n".join(
        [
            "import resource, pathlib",
            "from zero_offload.limits import locked_limits",
            "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))",
            f"print(locked_limits(pathlib.Path({str(root)!r})))",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "free=61440" in done.stdout
    (root / "proc/self/status").write_text("VmLck:\t 4 kB\nCapEff:\t0000000000004000\n")
    assert locked_limits(root) == []


def test_a_folder_that_does_not_exist_yet_has_the_space_of_the_one_above(tmp_path: Path) -> None:
    info = os.statvfs(tmp_path)
    assert disk_limit(str(tmp_path / "new" / "deep")).free == pytest.approx(info.f_bavail * info.f_frsize, rel=0.05)


@pytest.mark.skipif(not os.access(CGROUP_V1 / "cgroup.procs", os.W_OK), reason="needs a writable cgroup v1")
def test_a_real_cgroup_v1_limit_refuses_what_does_not_fit() -> None:
    group = CGROUP_V1 / f"zero-offload-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(1 << 30))
        program = f"""
import os
open("{group}/cgroup.procs", "w").write(str(os.getpid()))
import zero_offload
budget = zero_offload.HostBudget(reserve_bytes=0)
budget.need("something small", 100 << 20)
budget.check()
budget.need("something large", 1 << 30)
try:
    budget.check()
except zero_offload.BudgetError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    assert "something large" in done.stdout
    assert f"cgroup v1 {group}" in done.stdout
