"""The command `deepspeed`: zero-launch with DeepSpeed's options, which passes ``--local_rank`` to the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from zero_launch import main as launch
from zero_launch.options import parser

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""The name of the file with environment variables for other hosts."""

_GIVES_LOCAL_RANK = "zero_deepspeed.with_local_rank"


def main(args: Sequence[str] | None = None) -> int:
    """Run the command `deepspeed` and return its exit status, that of `zero-launch`.

    ``args``: its words; None for those of `sys.argv`. Without `--no_local_rank` and `--no_python`, each rank runs
    the script through with_local_rank.py. Raises ValueError for a number of hosts or ranks beside a filter of hosts.
    """
    words = list(sys.argv[1:] if args is None else args)
    options = parser().parse_args(words)
    if (options.include or options.exclude) and (options.num_nodes is not None or options.nproc is not None):
        problem = "--num_nodes or --num_gpus beside --include or --exclude: give either numbers or a filter"
        if args is None:
            parser().error(problem)
        raise ValueError(problem)
    if not options.no_local_rank and not options.no_python:
        target = [options.target, *options.args]
        own = words[: len(words) - len(options.args)]
        while own.pop() != options.target:  # argparse takes two dashes after the target away
            continue
        if own[-1:] == ["--"]:  # they ended our options, and would end those that follow here
            own.pop()
        if options.module:
            own = [word for word in own if word not in ("-m", "--module")]
            target = ["-m", *target]
        words = [*own, "-m", _GIVES_LOCAL_RANK, *target]
    return launch(["--as-deepspeed", *words])
