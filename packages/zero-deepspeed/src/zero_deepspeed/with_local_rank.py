"""Run a script with ``--local_rank=N`` in front of its arguments, as DeepSpeed's launcher gives it.

`python -m zero_deepspeed.with_local_rank [-m] SCRIPT …`
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the script that the command line names, or with ``-m`` the module, as ``__main__``, with `--local_rank=N` in
    front of its arguments. N is the value of LOCAL_RANK, or 0 without that variable.
    """
    module = sys.argv[1] == "-m"
    name, *arguments = sys.argv[2:] if module else sys.argv[1:]
    sys.argv = [name, f"--local_rank={os.environ.get('LOCAL_RANK', '0')}", *arguments]
    if module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
