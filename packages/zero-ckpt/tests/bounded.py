"""Python code in a process of little memory."""

from __future__ import annotations

import resource
import subprocess
import sys

MEMORY = 900 << 20
VERIFY = "import sys, zero_ckpt; print(*zero_ckpt.verify(sys.argv[1]).problems)"
OPEN = """
import sys
from zero_ckpt.conversion import open_source
try:
    open_source(sys.argv[1])
except Exception as error:
    print(repr(error))
"""
OPEN_BESIDE_TORCH = f"""
import resource
import zero_ckpt.conversion.dcp
nbytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (2 << 30)
resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
{OPEN}
"""
"""As `OPEN`, with 2 GiB beyond what torch takes, which is 4 GiB of addresses for builds with CUDA."""


def in_bounds(code: str, *arguments: object, memory: int = MEMORY) -> str:
    """Run Python code in a process of little memory; returns what it printed."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, preexec_fn=limit, timeout=100
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode()
