"""fio as a peer for benchmarks: the same file, direct I/O, one job."""

from __future__ import annotations

import json
import shutil
import subprocess

from .errors import AioError
from .measure import Sample

__all__ = ["ENGINES", "available", "run"]

ENGINES = {"libaio": [], "io_uring": ["--fixedbufs=1", "--registerfiles=1"]}


def available() -> bool:
    """Return whether fio is installed."""
    return shutil.which("fio") is not None


def run(kind: str, path: str, nbytes: int, engine: str, block_bytes: int, queue_depth: int) -> Sample:
    """Read or write the whole file of `nbytes` once with fio (`kind`: "read" or "write") and return its timing.

    `engine`: one of `ENGINES`, io_uring with registered files and buffers. `block_bytes` per operation, `queue_depth`
    of them in flight. AioError if fio fails.
    """
    command = ["fio", "--name=peer", f"--filename={path}", f"--size={nbytes}", "--direct=1", f"--rw={kind}"]
    command += [f"--ioengine={engine}", f"--bs={block_bytes}", f"--iodepth={queue_depth}", "--output-format=json"]
    command += ["--overwrite=1", "--invalidate=0", *ENGINES[engine]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise AioError(f"fio failed with exit status {done.returncode}: {done.stderr.strip()[-300:]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Sample(job[kind]["bw_bytes"] / 1e9, cpu_seconds / (nbytes / 1e9))
