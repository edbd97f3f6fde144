"""Within a limit that the kernel enforces, NVMe trains what the host tier is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CGROUP_V1 = Path("/sys/fs/cgroup/memory")

# What torch and the I/O engine themselves need is not what is limited here, so both run before the limit is set.
START = """
import os, pathlib, resource, sys
import psutil, torch, zero_nvme_aio, zero_offload
from zero_offload import FragmentPlan, HostBudget, NvmeStore, OffloadedUpdate, TierOptions, ShardPlan
folder, group = sys.argv[1], pathlib.Path(sys.argv[2])
torch.ones(1 << 20).add_(1).sum()
groups = [torch.optim.AdamW([torch.zeros(1)], lr=0.1).defaults]
engine = zero_nvme_aio.Engine()
units, numel = 12, 1 << 21
ones = torch.ones(numel, dtype=torch.bfloat16)
state = 16 * units * numel  # weights, gradients, masters and two moments
limit = state // 3
"""

LIMITS = {
    "cgroup": """
(group / "cgroup.procs").write_text(str(os.getpid()))
used = int((group / "memory.usage_in_bytes").read_text())
(group / "memory.limit_in_bytes").write_text(str(used + limit))
""",
    "RLIMIT_DATA": """
data = psutil.Process().memory_info().data
resource.setrlimit(resource.RLIMIT_DATA, (data + limit, data + limit))
""",
}

TRAIN = """
names = [f"unit {number}" for number in range(units)]
shards = [ShardPlan(n, numel, torch.bfloat16, torch.bfloat16, (FragmentPlan(n, 0, numel, 0),)) for n in names]
begin = psutil.Process().memory_info().data
weights = NvmeStore(folder + "/weights", device="cpu", buffer_count=3, engine=engine)
for name in names:
    weights.put(name, ones)

def update(tier_options, gradients):
    budget = HostBudget(reserve_bytes=0)
    return OffloadedUpdate(
        shards, "AdamW", lambda: groups, weights, tier_options, gradients=gradients, device="cpu", budget=budget
    )

try:
    update(TierOptions(), "host")
except zero_offload.BudgetError as error:
    print("refused:", error.table.splitlines()[-1])
tier_options = TierOptions(tier="nvme", path=folder + "/states", sub_group_size=1 << 20, buffer_count=3, engine=engine)
made = update(tier_options, "nvme")
held = sum(made.memory()[what] for what in ("states", "ring", "gradients", "staging")) + weights.resident_bytes
print("a fifth:", held < state // 5, made.memory() == made.plan)
for step in range(2):
    for name in names:
        made.add_gradient(name, ones)
    made.step()
    made.clear_gradients()
made.flush()
grown = psutil.Process().memory_info().data - begin
print("grown as planned:", held <= grown <= held + (4 << 20), grown - held)
values = set()
for name in names:
    shard = weights.acquire(name)
    values |= {float(shard[0]), float(shard[-1])}
    weights.release(name, dirty=False)
print("trained:", sorted(values))
made.close()
weights.close()
"""


def run(folder: Path, limit: str, group: Path) -> str:
    program = START + LIMITS[limit] + TRAIN
    arguments = [sys.executable, "-c", program, str(folder), str(group)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(output: str) -> None:
    assert "refused: host memory" in output
    assert "a fifth: True True" in output
    assert "grown as planned: True" in output
    assert "trained: [0.796875]" in output


@pytest.mark.skipif(not os.access(CGROUP_V1 / "cgroup.procs", os.W_OK), reason="needs a writable cgroup v1")
def test_a_model_three_times_the_limit_of_its_cgroup_trains_on_nvme(tmp_path: Path) -> None:
    group = CGROUP_V1 / f"zero-offload-limit-{os.getpid()}"
    group.mkdir()
    try:
        check(run(tmp_path, "cgroup", group))
    finally:
        group.rmdir()


def test_a_model_three_times_the_limit_of_its_process_trains_on_nvme(tmp_path: Path) -> None:
    check(run(tmp_path, "RLIMIT_DATA", tmp_path))
